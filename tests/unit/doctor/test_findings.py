"""Each trouble of a machine and its folders that drawbar knows, found in facts that were really gathered."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from drawbar.jobs.doctor import findings
from drawbar.jobs.doctor.findings import GIB, MIB, Machine, look_at_folder, look_at_machine
from drawbar.launch.findings import Finding, Level

HAS_NAMESPACES = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason="this machine lets nobody have namespaces of their own")
SHOW = """
import json, os
from dataclasses import asdict
from drawbar.jobs.doctor.findings import *
from drawbar.jobs.doctor.findings import *
def show(facts):
    print(json.dumps(asdict(facts)))
"""


@pytest.fixture(scope="module")
def machine() -> Machine:
    """This one, as if nothing were wrong with it."""
    return replace(
        look_at_machine(), cores=4, memory_available=8 * GIB, shared_memory_free=GIB, open_files=4096,
        locked_memory=None, has_infiniband=False, address="10.0.0.1",
        interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    )  # fmt: skip


def trouble(found: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level is not Level.OK]


def check(found: Iterable[Finding], where: str, level: Level, *says: str) -> None:
    """That one thing is wrong, and what is said of it."""
    (finding,) = trouble(found)
    assert (finding.where, finding.level) == (where, level)
    assert finding.remedy
    for words in says:
        assert words in f"{finding.what}\n{finding.remedy}"


def gather(script: str, *prefix: str) -> dict:
    """The facts that a script ``show``s in a process of its own."""
    command = [*prefix, sys.executable, "-c", SHOW + script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_machine_in_good_order(machine: Machine) -> None:
    found = list(findings.of_machine(machine, {"OMP_NUM_THREADS": "2"}, processes=2, many_nodes=True))
    assert not trouble(found)
    assert [finding.where for finding in found] == ["host", "cores", "memory", "/dev/shm", "open files", "interfaces"]


@pytest.mark.parametrize(
    ("facts", "where", "says"),
    [
        ({"cores": 1.5}, "cores", ("1.5 for 2 processes", "launch.nproc=1")),
        ({"memory_available": GIB}, "memory", ("1.0 GiB available", "--mem")),
        ({"shared_memory_free": 64 * MIB}, "/dev/shm", ("64.0 MiB free", "--shm-size=8g")),
        ({"open_files": 512}, "open files", ("512 at once", "ulimit -n")),
        ({"has_infiniband": True, "locked_memory": 8 * MIB}, "locked memory", ("ibv_reg_mr", "ulimit -l unlimited")),
        ({"address": "127.0.1.1"}, "host name", ("127.0.1.1", "export GLOO_SOCKET_IFNAME=")),
        ({"address": ""}, "host name", ("unknown", "export GLOO_SOCKET_IFNAME=")),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_machine(
    machine: Machine, facts: dict[str, object], where: str, says: tuple[str, ...]
) -> None:
    wrong = replace(machine, **facts)  # type: ignore[arg-type]
    check(findings.of_machine(wrong, {}, processes=2, many_nodes=True), where, Level.WARNING, *says)


def test_what_is_only_wrong_on_many_nodes_or_with_infiniband(machine: Machine) -> None:
    alone = replace(machine, address="127.0.1.1", locked_memory=8 * MIB, shared_memory_free=None, open_files=None)
    assert not trouble(findings.of_machine(alone, {}, processes=1))
    assert not trouble(findings.of_machine(alone, {"GLOO_SOCKET_IFNAME": "eth0"}, processes=1, many_nodes=True))


def test_more_threads_than_cores(machine: Machine) -> None:
    found = findings.of_machine(machine, {"OMP_NUM_THREADS": "4"}, processes=2)
    check(found, "OMP_NUM_THREADS", Level.WARNING, "cores for 2", "export OMP_NUM_THREADS=2")


@pytest.mark.parametrize(
    ("variable", "value", "is_right"),
    [
        ("GLOO_SOCKET_IFNAME", "ib7", False),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("NCCL_SOCKET_IFNAME", "ib7,ib8", False),
        ("NCCL_SOCKET_IFNAME", "l", True),
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "=lo", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
    ],
)
def test_interfaces_that_are_named(machine: Machine, variable: str, value: str, is_right: bool) -> None:
    found = findings.of_machine(machine, {variable: value}, processes=1)
    if is_right:
        assert not trouble(found)
    else:
        check(found, variable, Level.PROBLEM, value, "lo, eth0", f"unset {variable}")


@namespaces
def test_limits_and_shared_memory_are_those_of_the_process(tmp_path: Path) -> None:
    script = f"""
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
os.system("mount -t tmpfs -o size=32m none {tmp_path}")
show(look_at_machine(shared_memory={str(tmp_path)!r}))
"""
    facts = gather(script, "unshare", "-rm")
    assert (facts["open_files"], facts["locked_memory"], facts["shared_memory_free"]) == (300, 4096, 32 * MIB)
    assert facts["cores"] <= 1
    assert facts["interfaces"]["lo"] == "127.0.0.1"


def test_a_folder_that_can_be_written(tmp_path: Path) -> None:
    folder = look_at_folder("run.dir", tmp_path / "runs" / "here")
    (found,) = findings.of_folder(folder, enough=1, least=1, builds=folder.can_execute)
    assert found.level is Level.OK
    assert list(tmp_path.iterdir()) == []


@namespaces
def test_disks_that_are_full_or_read_only_or_run_nothing(tmp_path: Path) -> None:
    facts = {}
    for option in ("size=512k", "ro", "size=256m,noexec"):
        script = f"""
os.system("mount -t tmpfs -o {option} none {tmp_path}")
show(look_at_folder("TMPDIR", {str(tmp_path / "new")!r}))
"""
        facts[option] = replace(look_at_folder("TMPDIR", tmp_path), **gather(script, "unshare", "-rm"))
    full, read_only, no_exec = facts.values()
    check(findings.of_folder(full, GIB), "TMPDIR", Level.PROBLEM, "No space left", "export TMPDIR=ANOTHER_FOLDER")
    check(findings.of_folder(read_only, GIB), "TMPDIR", Level.PROBLEM, "Read-only file system")
    check(findings.of_folder(read_only, GIB, needed=False), "TMPDIR", Level.WARNING, "Read-only file system")
    check(findings.of_folder(no_exec, 1, builds=True), "TMPDIR", Level.WARNING, "mounted noexec")
    assert not trouble(findings.of_folder(no_exec, 1))


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    folder = look_at_folder("run.dir", tmp_path / "runs" / "new")
    check(findings.of_folder(folder, 1), "run.dir", Level.PROBLEM, "not a folder", "set run.dir=ANOTHER_FOLDER")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_somebody_else() -> None:
    script = 'os.setresuid(65534, 65534, 65534)\nshow(look_at_folder("run.dir", "/etc/runs"))'
    folder = replace(look_at_folder("run.dir", "/"), **gather(script))
    check(findings.of_folder(folder, 1), "run.dir", Level.PROBLEM, "Permission denied", "make /etc yours")


def test_little_room_and_no_locks(tmp_path: Path) -> None:
    folder = look_at_folder("run.dir", tmp_path)
    check(findings.of_folder(folder, 2**60), "run.dir", Level.WARNING, "free some space")
    check(findings.of_folder(replace(folder, free=1), GIB), "run.dir", Level.PROBLEM, "the disk is nearly full")
    without = replace(folder, has_locks=False)
    check(findings.of_folder(without, 1, 1), "run.dir", Level.WARNING, "flock does not work", "-o flock")


def test_models_of_the_hub_that_cannot_be_had() -> None:
    cached = {"gpt2": True, "bert-base-cased": False}
    found = findings.of_hub(cached, "HF_HUB_OFFLINE is set")
    check(found, "bert-base-cased", Level.PROBLEM, "HF_HUB_OFFLINE is set", "hf download bert-base-cased")
    assert not trouble(findings.of_hub(cached, ""))


def test_findings_travel_as_json() -> None:
    finding = findings.problem("n1", "it is gone", "look for it")
    assert Finding.from_json(json.loads(json.dumps(asdict(finding)))) == finding
    assert str(finding.error()) == "it is gone\n  where: n1\n  fix:   look for it"
