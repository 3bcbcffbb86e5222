"""What torch and nvidia-smi say of this machine, in processes of their own; also those that are broken."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.jobs.doctor import findings
from drawbar.jobs.doctor.examine import ask_torch
from drawbar.launch.findings import Finding, Gpu, Gpus, Level, look_at_gpus, of_gpus

ENV = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ONE = {**ENV, "OMP_NUM_THREADS": "1"}
DRIVER = Gpus(driver="570.86.10")


def levels(found: list[Finding]) -> dict[str, Level]:
    return {finding.where: finding.level for finding in found}


@pytest.fixture(scope="module")
def cpu() -> dict[str, Any]:
    return ask_torch("cpu", "auto", 2, environ=ONE)


@pytest.mark.exhaustive
def test_a_cpu(cpu: dict[str, Any]) -> None:
    assert (cpu["torch"], cpu["device"], cpu["errors"]) == (torch.__version__, "cpu", {})
    assert cpu["precision"] in ("bf16", "fp32")
    assert set(levels(list(findings.of_torch(cpu, Gpus(), "cpu"))).values()) == {Level.OK}


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_asked_for_and_a_wrong_place_is_given() -> None:
    place = {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    facts = ask_torch("cuda", "auto", 1, environ={**ONE, **place})
    assert facts["errors"]["launcher"]["what"] == "RANK=3 is not below WORLD_SIZE=2"
    *_, device = findings.of_torch(facts, Gpus(), "cuda")
    assert device.level is Level.PROBLEM
    assert "torch sees no CUDA device" in device.what
    assert "device=cpu" in device.remedy


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
    facts = ask_torch("auto", "auto", 1, environ={**ONE, "PYTHONPATH": path}, timeout=timeout)
    (found,) = findings.of_torch(facts, Gpus(), "auto")
    assert found.level is Level.PROBLEM
    assert says in found.what
    assert "import torch" in found.remedy


@pytest.mark.exhaustive
def test_a_driver_whose_gpus_torch_does_not_see(cpu: dict[str, Any]) -> None:
    reason = "The NVIDIA driver on your system is too old (found version 11040)."
    for build in ({"cuda": None}, {"cuda": "12.8", "reason": reason}):
        facts = {**cpu, "gpus": 0, **build}
        found = next(findings.of_torch(facts, DRIVER, "auto"))
        assert found.level is Level.WARNING
        assert "sees no GPU of the NVIDIA driver 570.86.10" in found.what
        assert "--index-url" in found.remedy
        assert next(findings.of_torch(facts, DRIVER, "cpu")).level is Level.OK
    assert "is too old" in found.what


NVIDIA_SMI = """\
#!/bin/bash
case "$1" in
  *gpu=*) printf '0, GPU-aaa, 81559, 4, 550.54.15\\n1, GPU-bbb, 81559, 76000, 550.54.15\\n';;
  *) printf 'GPU-bbb, 4711\\nGPU-bbb, 4712\\n';;
esac
"""


def test_gpus_as_nvidia_smi_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: the program comes with the driver."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert look_at_gpus({}) == Gpus()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    free, used = Gpu(0, 81559, 4), Gpu(1, 81559, 76000, "4711, 4712")
    assert look_at_gpus({}) == Gpus((free, used), "550.54.15")
    assert look_at_gpus({"CUDA_VISIBLE_DEVICES": "1"}).gpus == (used,)
    assert look_at_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aaa"}).gpus == (free,)
    assert look_at_gpus({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()
    program.write_text("#!/bin/bash\necho 'Failed to initialize NVML: Driver/library version mismatch' >&2\nexit 9\n")
    (found,) = of_gpus(look_at_gpus({}))
    assert found.what == "nvidia-smi failed: Failed to initialize NVML: Driver/library version mismatch"
    program.write_text("#!/bin/bash\necho '0, GPU-aaa, [N/A], [N/A], 550.54.15'\n")
    assert look_at_gpus({}) == Gpus(driver="550.54.15")


def test_gpus_that_others_use() -> None:
    gpus = Gpus((Gpu(0, 80_000, 500), Gpu(1, 80_000, 9_000, "42"), Gpu(2, 80_000, 79_000)))
    found = list(of_gpus(gpus))
    assert levels(found) == {"GPU 1": Level.WARNING, "GPU 2": Level.PROBLEM}
    assert found[0].what == "GPU 1 is in use: 9,000 of 80,000 MiB are taken (processes 42)"
