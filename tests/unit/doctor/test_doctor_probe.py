"""What the doctor asks torch, in processes of their own: answers, refusals, and torches that are broken."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import doctor_sites
from drawbar.doctor.finding import Finding, Level
from drawbar.doctor.probe_process import check_device, check_rendezvous, driver_version, start_probe

ENV = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ONE = {**ENV, "OMP_NUM_THREADS": "1"}
PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Tue Jan 14 10:00:00 UTC 2025\nGCC version: gcc 12\n"


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.name: finding.level for finding in findings}


@pytest.fixture(scope="module")
def cpu() -> dict[str, Any]:
    return start_probe("device", "cpu", "auto", "2", environ=ONE).result()


def test_a_cpu(cpu: dict[str, Any]) -> None:
    assert cpu["torch"] == torch.__version__
    assert cpu["device"] == "cpu"
    assert cpu["precision"] in ("bf16", "fp32")
    assert not cpu["errors"]
    assert cpu["product"]["right"] is True
    findings = list(check_device(cpu, None, "cpu", "auto"))
    assert set(levels(findings).values()) == {Level.OK}
    assert "device=cpu" in [finding.why for finding in findings]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_asked_for_and_a_wrong_place_is_given() -> None:
    environ = {**ONE, "RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    facts = start_probe("device", "cuda", "auto", "1", environ=environ).result()
    assert facts["errors"]["launcher"][0] == "RANK=3 is not below WORLD_SIZE=2"
    device = next(finding for finding in check_device(facts, None, "cuda", "auto") if finding.name == "device")
    assert device.level is Level.PROBLEM
    assert "torch sees no CUDA device" in device.what
    assert "device=cpu" in str(device.fix)


@pytest.mark.parametrize(
    ("body", "timeout", "says"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", 120, "libcudart.so.12: cannot open"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 120, "killed by SIGSEGV"),
        ("import time; time.sleep(600)", 1, "no answer after 1 s"),
    ],
)
def test_a_torch_that_is_broken(body: str, timeout: float, says: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(body)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    facts = start_probe("device", "auto", "auto", "1", environ={**ONE, "PYTHONPATH": path}, timeout=timeout).result()
    (found,) = check_device(facts, None, "auto", "auto")
    assert found.level is Level.PROBLEM
    assert says in found.what
    assert "import torch" in str(found.fix)


def test_a_wrong_product(cpu: dict[str, Any]) -> None:
    wrong = {**cpu, "product": {"right": False, "seconds": 0.1}}
    assert levels(list(check_device(wrong, None, "cpu", "auto")))["a product"] is Level.PROBLEM


def test_a_gpu_that_torch_cannot_use(cpu: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "version").write_text(PROC)
    driver = driver_version(str(tmp_path / "version"))
    assert driver == "570.86.10"
    assert driver_version(str(tmp_path / "none")) is None
    for cuda, says in ((None, "--index-url"), ("12.8", "unset CUDA_VISIBLE_DEVICES")):
        facts = {**cpu, "cuda": cuda, "gpus": []}
        found = next(
            finding for finding in check_device(facts, driver, "auto", "auto") if finding.name == "torch build"
        )
        assert found.level is Level.WARNING
        assert says in str(found.fix)
        assert levels(list(check_device(facts, driver, "cpu", "auto")))["torch build"] is Level.OK


def test_a_gpu_that_others_use(cpu: dict[str, Any]) -> None:
    gpu = {"name": "a GPU", "memory": 80 * 2**30, "free": 20 * 2**30}
    found = levels(list(check_device({**cpu, "gpus": [gpu, {**gpu, "free": 79 * 2**30}]}, "1.2", "auto", "auto")))
    assert (found["GPU 0"], found["GPU 1"]) == (Level.WARNING, Level.OK)


def test_two_processes_meet() -> None:
    facts = start_probe("rendezvous", environ=ONE).result()
    assert facts["right"] is True
    assert check_rendezvous(facts).level is Level.OK
    assert check_rendezvous({**facts, "right": False}).level is Level.PROBLEM


def test_two_processes_that_cannot_meet() -> None:
    begin = time.monotonic()
    facts = start_probe("rendezvous", environ={**ONE, "GLOO_SOCKET_IFNAME": "ib7"}).result()
    assert time.monotonic() - begin < 25
    found = check_rendezvous(facts)
    assert found.level is Level.PROBLEM
    assert "Unable to find address for: ib7" in found.what
    assert "enforce fail" not in found.what
    assert "GLOO_SOCKET_IFNAME" in str(found.fix)


def test_every_trouble_is_caused_here(request: pytest.FixtureRequest) -> None:
    doctor_sites.check_all_were_caused(request, "probe_process")
