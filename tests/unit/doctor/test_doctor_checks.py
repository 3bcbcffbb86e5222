"""Every trouble that the doctor knows, caused, and found in facts that were really collected."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import doctor_sites
import drawbar
from drawbar.doctor import examine
from drawbar.doctor.environment import check_hub, check_launcher, check_slurm_gpus
from drawbar.doctor.finding import Finding, Fix, Level
from drawbar.doctor.host import check_compiler, check_host, collect_compiler, collect_host
from drawbar.doctor.libraries import check_libraries, collect_libraries
from drawbar.doctor.network import check_network, choose_interface, collect_network, first_host
from drawbar.doctor.storage import check_folder
from drawbar.launch.folder_facts import GIB, _kind, collect_folder

HAS_NAMESPACES = subprocess.run(["unshare", "-rmnu", "true"], capture_output=True).returncode == 0
namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason="this machine lets nobody have namespaces of their own")
ENV = {"PATH": os.environ["PATH"]}
SHOW = f"""
import json, os, sys, tempfile
sys.path.insert(0, {str(Path(doctor_sites.__file__).parent)!r})
import doctor_sites
from dataclasses import asdict
def show(findings):
    found = [asdict(finding) for finding in findings]
    print(json.dumps({{"found": found, "sites": list(doctor_sites.seen)}}))
"""


def find(findings: Iterable[Finding], name: str) -> Finding:
    found = [finding for finding in findings if finding.name == name]
    assert len(found) == 1, [finding.name for finding in found]
    return found[0]


def trouble(finding: Finding, level: Level, *says: str) -> None:
    assert finding.level is level, finding
    assert finding.fix is not None
    said = "\n".join((finding.what, finding.why, finding.fix.command, finding.fix.words))
    for words in says:
        assert words in said, finding


def read(found: dict[str, Any]) -> Finding:
    fix = found["fix"] and Fix(**found["fix"])
    return Finding(**{**found, "level": Level(found["level"]), "fix": fix})


def elsewhere(script: str, *unshare: str) -> list[Finding]:
    """What a script ``show``s in a process of its own, in namespaces of its own."""
    return alone(script, "unshare", "-r", *unshare)


def alone(script: str, *prefix: str) -> list[Finding]:
    """What a script ``show``s in a process of its own."""
    command = [*prefix, sys.executable, "-c", SHOW + script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    doctor_sites.seen.update((module, line) for module, line in shown["sites"])
    return [read(found) for found in shown["found"]]


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


# The machine


def test_a_machine_in_good_order() -> None:
    findings = list(check_host(collect_host({}), 1))
    assert [finding.name for finding in findings] == ["host", "CPU", "OMP threads", "memory", "/dev/shm", "open files"]
    assert not findings[1].is_trouble
    assert not findings[2].is_trouble


def test_more_processes_than_cores() -> None:
    script = """
from drawbar.doctor.host import *
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
show(check_host(collect_host(), 2))
"""
    trouble(find(alone(script), "CPU"), Level.WARNING, "1 core", "--cpus-per-task")
    quota = replace(collect_host({}), cores=8, all_cores=8, cpu_quota=1.5)
    trouble(find(check_host(quota, 2), "CPU"), Level.WARNING, "time for 1.5", "launch.nproc=1")


@pytest.mark.parametrize("threads", ["0", "all", "", "999"])
def test_omp_threads(threads: str) -> None:
    cores = len(os.sched_getaffinity(0))
    found = find(check_host(collect_host({"OMP_NUM_THREADS": threads}), 1), "OMP threads")
    trouble(found, Level.WARNING, "OMP_NUM_THREADS=", f"export OMP_NUM_THREADS={cores}")


@pytest.mark.parametrize(("available", "level"), [(GIB, Level.WARNING), (GIB // 4, Level.PROBLEM)])
def test_little_memory(available: int, level: Level) -> None:
    host = collect_host({})
    trouble(find(check_host(replace(host, memory_available=available), 1), "memory"), level, "--mem")
    limited = replace(host, memory_limit=available)
    trouble(find(check_host(limited, 1), "memory"), level, "of which the container gets")


@namespaces
def test_little_shared_memory(tmp_path: Path) -> None:
    script = f"""
from drawbar.doctor.host import *
os.system("mount -t tmpfs -o size=64m none {tmp_path}")
show(check_host(collect_host(shared_memory={str(tmp_path)!r}), 1))
"""
    trouble(find(elsewhere(script, "-m"), "/dev/shm"), Level.WARNING, "64 MiB", "--shm-size=8g")


def test_shared_memory_that_is_full_or_absent(tmp_path: Path) -> None:
    full = replace(collect_host({}), shared_memory=8 * GIB, shared_memory_free=0)
    trouble(find(check_host(full, 1), "/dev/shm"), Level.WARNING, "ls -lS /dev/shm")
    none = collect_host({}, shared_memory=str(tmp_path / "shm"))
    assert find(check_host(none, 1), "/dev/shm").level is Level.NOTE


@pytest.mark.parametrize(("files", "level"), [(512, Level.WARNING), (200, Level.PROBLEM)])
def test_few_open_files(files: int, level: Level) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        host = collect_host({})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    trouble(find(check_host(host, 1), "open files"), level, f"{files} at once", "ulimit -n")
    low = replace(host, open_files_hard_limit=files)
    trouble(find(check_host(low, 1), "open files"), level, "limits.conf")


def stub_compiler(folder: Path, script: str) -> dict[str, str]:
    path = folder / "g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(("compiles", "level"), [(True, Level.PROBLEM), (False, Level.NOTE)])
def test_compilers(compiles: bool, level: Level, tmp_path: Path) -> None:
    none = collect_compiler({"PATH": str(tmp_path)})
    trouble(check_compiler(none, compiles, False), level, "there is none", "apt-get install g++")
    other = collect_compiler({**ENV, "CXX": "no-such-compiler"})
    trouble(check_compiler(other, compiles, False), level, "there is none")
    broken = collect_compiler(stub_compiler(tmp_path, "echo 'cannot execute cc1plus' >&2; exit 1"))
    trouble(check_compiler(broken, compiles, False), level, "cannot execute cc1plus")
    silent = collect_compiler(stub_compiler(tmp_path, "exit 3"))
    trouble(check_compiler(silent, compiles, False), level, "exit code 3")
    good = replace(collect_compiler(stub_compiler(tmp_path, "cat > /dev/null")), has_python_headers=False)
    trouble(check_compiler(good, compiles, True), level, "Python.h", "python3-dev")
    assert check_compiler(good, compiles, False).level is Level.OK


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_real_compiler_is_tried() -> None:
    assert collect_compiler(ENV).error == ""


# Libraries


def stub_library(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    extras = [f"Provides-Extra: {extra}" for extra in ("deepspeed", "lora", "dev")]
    (info / "METADATA").write_text("\n".join([*lines, *extras, *(f"Requires-Dist: {text}" for text in requires)]))


def test_libraries_are_those_that_are_wanted() -> None:
    findings = list(check_libraries(collect_libraries(), {}))
    assert not [finding for finding in findings if finding.is_trouble]
    names = [finding.name for finding in findings]
    assert names[:3] == ["drawbar", "torch", "transformers"]
    assert {"deepspeed", "peft"} <= set(names)
    assert "pytest" not in names  # the developers' own


@pytest.mark.parametrize("version", ["4.49.0", "unknown"])
def test_an_old_library(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_library(tmp_path, "transformers", version)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find(check_libraries(collect_libraries(), {}), "transformers")
    trouble(found, Level.PROBLEM, f"{version}, but drawbar wants transformers>=5.17", "-m pip install 'transformers>=5")


def test_a_library_that_is_newer_than_those_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_library(tmp_path, "transformers", "99.1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find(check_libraries(collect_libraries(), {}), "transformers")
    trouble(found, Level.WARNING, "99.1.0: drawbar is tested up to 5.24.0")


def test_an_old_library_of_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_library(tmp_path, "deepspeed", "0.9.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    libraries = collect_libraries()
    trouble(find(check_libraries(libraries, {}), "deepspeed"), Level.WARNING, "0.9.0", "DS_BUILD_OPS=0")
    needed = {"deepspeed": "parallel.strategy=deepspeed"}
    trouble(find(check_libraries(libraries, needed), "deepspeed"), Level.PROBLEM, "parallel.strategy=deepspeed")


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ("made-up-one>=2", 'made-up-two>=3; extra == "lora"', 'made-up-three; extra == "dev"')
    stub_library(tmp_path, "drawbar", "9.9", *wanted)
    monkeypatch.syspath_prepend(str(tmp_path))
    libraries = collect_libraries()
    findings = list(check_libraries(libraries, {}))
    trouble(find(findings, "made-up-one"), Level.PROBLEM, "not installed", "pip install 'made-up-one>=2'")
    assert find(findings, "made-up-two").level is Level.OK
    assert "made-up-three" not in [finding.name for finding in findings]
    needed = {"lora": "the section lora"}
    trouble(find(check_libraries(libraries, needed), "made-up-two"), Level.PROBLEM, "the section lora needs it")


# Network


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
def test_interfaces_that_are_named(variable: str, value: str, is_right: bool) -> None:
    found = find(check_network(collect_network({variable: value}), False, False), variable)
    if is_right:
        assert found.level is Level.OK
    else:
        trouble(found, Level.PROBLEM, f"{variable}={value}", "lo", f"unset {variable}")


@namespaces
def test_no_network_at_all() -> None:
    script = "from drawbar.doctor.network import *\n{}show(check_network(collect_network({{}}), True, False))"
    found = elsewhere(script.format(""), "-n")
    trouble(find(found, "interface"), Level.PROBLEM, "no interface has an address", "ip link set lo up")
    if shutil.which("ip"):
        found = elsewhere(script.format('os.system("ip link set lo up")\n'), "-n")
        trouble(find(found, "interface"), Level.PROBLEM, "lo (127.0.0.1)", "ip route")


@namespaces
def test_a_host_name_that_nothing_knows() -> None:
    script = """
import socket
from drawbar.doctor.network import *
socket.sethostname("no-such-host.invalid")
show(check_network(collect_network({}), False, False))
"""
    found = find(elsewhere(script, "-un"), "host name")  # without a network, so that no name server is waited for
    trouble(found, Level.WARNING, "no-such-host.invalid", "/etc/hosts")


def test_a_host_name_that_leads_home() -> None:
    network = replace(collect_network({}), host_address="127.0.1.1")
    found = find(check_network(network, True, False), "host name")
    trouble(found, Level.WARNING, "127.0.1.1", "export GLOO_SOCKET_IFNAME=")
    assert find(check_network(network, False, False), "host name").level is Level.OK
    named = replace(network, socket_names=(("GLOO_SOCKET_IFNAME", "lo"),))
    assert find(check_network(named, True, False), "host name").level is Level.OK


@namespaces
def test_a_first_node_that_nothing_knows() -> None:
    script = """
from drawbar.doctor.network import *
show(check_network(collect_network({"MASTER_ADDR": "no-such-host.invalid"}), True, False))
"""
    trouble(find(elsewhere(script, "-n"), "first node"), Level.PROBLEM, "getent hosts no-such-host.invalid")


def test_a_port_that_is_taken(listening: int) -> None:
    network = collect_network({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening)})
    found = find(check_network(network, False, True), "port")
    trouble(found, Level.PROBLEM, f"{listening} (MASTER_PORT) is taken", "export MASTER_PORT=")
    assert find(check_network(network, False, False), "port").level is Level.OK  # the launcher's own
    usual = replace(network, port_is_given=False)
    assert find(check_network(usual, False, False), "port").level is Level.NOTE


def test_infiniband_is_preferred() -> None:
    network = collect_network({})
    chosen, why = choose_interface(network)
    assert chosen is not None
    assert why != "InfiniBand"
    second, _ = choose_interface(replace(network, route_address="10.9.8.7"))
    assert second is not None
    assert (second.name, second.address) == ("", "10.9.8.7")
    fast = replace(network.interfaces[0], name="ib0", address="10.0.0.1", infiniband=True)
    assert choose_interface(replace(network, interfaces=(*network.interfaces, fast))) == (fast, "InfiniBand")


@pytest.mark.parametrize(
    ("nodes", "first"), [("n[07-09,12],m1", "n07"), ("n1,n2", "n1"), ("gpu-a", "gpu-a"), ("c[3,5]", "c3"), ("", "")]
)
def test_the_first_host_of_a_job(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


# Storage


def folder(path: Path) -> list[Finding]:
    return list(check_folder(collect_folder("run.dir", path, "set run.dir=OTHER"), 1))


def test_a_folder_that_can_be_written(tmp_path: Path) -> None:
    (found,) = folder(tmp_path / "runs" / "here")
    assert found.level is Level.OK
    assert "not made yet" in found.what
    assert "flock works" in found.why
    assert list(tmp_path.iterdir()) == []


@namespaces
@pytest.mark.parametrize(
    ("option", "what", "fix"), [("size=512k", "the disk is full", "df -h"), ("ro", "Read-only file system", "ls -ld")]
)
def test_disks_that_are_full_or_read_only(option: str, what: str, fix: str, tmp_path: Path) -> None:
    script = f"""
from drawbar.launch.folder_facts import *
from drawbar.doctor.storage import *
os.system("mount -t tmpfs -o {option} none {tmp_path}")
show(check_folder(collect_folder("run.dir", {str(tmp_path / "runs")!r}, "set run.dir=OTHER"), 1))
"""
    (found,) = elsewhere(script, "-m")
    trouble(found, Level.PROBLEM, what, fix, "set run.dir=OTHER")


def test_files_that_are_limited_in_size(tmp_path: Path) -> None:
    script = f"""
import resource
from drawbar.launch.folder_facts import *
from drawbar.doctor.storage import *
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
show(check_folder(collect_folder("run.dir", {str(tmp_path)!r}, "set run.dir=OTHER"), 1))
"""
    (found,) = alone(script)
    trouble(found, Level.PROBLEM, "File too large", "ulimit -f unlimited")
    assert list(tmp_path.iterdir()) == []


@namespaces
def test_no_folder_for_temporary_files() -> None:
    script = """
from drawbar.doctor import examine
from drawbar.config.schema.run_config import RunConfig
for folder in ("/tmp", "/var/tmp", "/usr/tmp"):
    os.path.isdir(folder) and os.system(f"mount -t tmpfs -o ro none {folder}")
os.chdir("/proc")
os.environ.pop("TMPDIR", None)
show(examine._folders(RunConfig(), downloads=False))
"""
    trouble(find(elsewhere(script, "-m"), "temporary files"), Level.PROBLEM, "export TMPDIR=")


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    (found,) = folder(tmp_path / "runs")
    trouble(found, Level.PROBLEM, "not a folder", "ls -ld")
    shared = collect_folder("HF_HOME", tmp_path / "runs", "export HF_HOME=OTHER")
    trouble(*check_folder(shared, 1, Level.WARNING), Level.WARNING, "export HF_HOME=OTHER")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    script = """
from drawbar.launch.folder_facts import *
from drawbar.doctor.storage import *
os.setresuid(65534, 65534, 65534)
show(check_folder(collect_folder("run.dir", "/etc/runs", "set run.dir=OTHER"), 1))
"""
    (found,) = alone(script)
    trouble(found, Level.PROBLEM, "Permission denied", "chown")


def test_little_room_and_no_locks(tmp_path: Path) -> None:
    facts = collect_folder("run.dir", tmp_path, "set run.dir=OTHER")
    (found,) = check_folder(facts, 2**60)
    trouble(found, Level.WARNING, "df -h")
    (found,) = check_folder(replace(facts, free=1), GIB)
    trouble(found, Level.PROBLEM, "the disk is full")
    (found,) = check_folder(replace(facts, locks=False), 1)
    trouble(found, Level.PROBLEM, "flock does not work", "-o flock")


def test_network_file_systems(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"98 27 0:47 / {tmp_path.parent} rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2\n"
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n"
    )
    assert _kind(tmp_path, str(mounts)) == "nfs4"
    assert _kind(Path("/"), str(mounts)) == "ext4"
    (found,) = check_folder(replace(collect_folder("run.dir", tmp_path, "set"), kind="nfs4"), 1)
    assert "a network file system" in found.what


# Environment

RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("environ", "name", "level", "says"),
    [
        ({**RANKS, "WORLD_SIZE": "3"}, "WORLD_SIZE", Level.PROBLEM, "no multiple of LOCAL_WORLD_SIZE=2"),
        ({**RANKS, **SLURM, "WORLD_SIZE": "2"}, "WORLD_SIZE", Level.WARNING, "Slurm gave 2 nodes"),
        ({**RANKS, **SLURM, "WORLD_SIZE": "2"}, "WORLD_SIZE", Level.WARNING, "drawbar submit config.yaml --to slurm"),
        ({**RANKS, "LOCAL_RANK": "2"}, "LOCAL_RANK", Level.PROBLEM, "not below LOCAL_WORLD_SIZE=2"),
        ({**RANKS, "MASTER_PORT": "http"}, "MASTER_PORT", Level.PROBLEM, "export MASTER_PORT=29500"),
        ({**RANKS, "MASTER_PORT": "99999"}, "MASTER_PORT", Level.PROBLEM, "99999 is no port"),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "8"},
            "srun",
            Level.PROBLEM,
            "drawbar submit config.yaml --to slurm --nodes 2",
        ),
    ],
)
def test_launchers_that_contradict_themselves(environ: dict[str, str], name: str, level: Level, says: str) -> None:
    trouble(find(check_launcher(environ, 2, ""), name), level, says)


@pytest.mark.parametrize("environ", [{}, RANKS, SLURM, {**RANKS, **SLURM}, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}])
def test_launchers_in_good_order(environ: dict[str, str]) -> None:
    assert not [finding for finding in check_launcher(environ, 2, "") if finding.is_trouble]


def test_gpus_that_slurm_gave() -> None:
    trouble(*check_slurm_gpus({"SLURM_GPUS_ON_NODE": "4"}, 2), Level.WARNING, "Slurm gave 4", "torch sees 2")
    assert not list(check_slurm_gpus({"SLURM_GPUS_ON_NODE": "2"}, 2))
    assert not list(check_slurm_gpus({}, 2))
    assert not list(check_slurm_gpus({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_NUM_TASKS": "4"}, 1))  # one for each task


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_model_of_the_hub_without_a_network(variable: str) -> None:
    found = list(check_hub({variable: "1"}, {"bert-base-cased": False, "gpt2": True}, None))
    trouble(find(found, "bert-base-cased"), Level.PROBLEM, f"{variable}=0 hf download bert-base-cased")
    assert find(found, "gpt2").level is Level.OK
    assert find(found, "mode").level is Level.NOTE
    away = list(check_hub({}, {"bert-base-cased": False}, False))
    trouble(find(away, "bert-base-cased"), Level.PROBLEM, "the hub does not answer", "HTTPS_PROXY")
    assert find(check_hub({}, {"bert-base-cased": False}, True), "bert-base-cased").level is Level.OK


@pytest.mark.parametrize("value", ["proxy:3128", "http://", "http://host:port", "ftp://host:21", "http://[::1"])
def test_a_proxy_that_is_none(value: str) -> None:
    trouble(find(check_hub({"https_proxy": value}, {}, None), "https_proxy"), Level.WARNING, "unset https_proxy")


def test_nothing_secret_is_shown() -> None:
    environ = {
        "HF_TOKEN": "canary", "https_proxy": "http://me:canary@host:1", "HTTP_PROXY": "http://me:canary@host:port",
    }  # fmt: skip
    said = str(list(check_hub(environ, {}, None)))
    assert "host:1" in said
    assert "canary" not in said


def test_trouble_without_a_way_out_is_refused() -> None:
    with pytest.raises(ValueError, match="no fix"):
        Finding("Machine", "CPU", Level.PROBLEM, "it is gone")


# The configuration


@pytest.mark.parametrize(
    ("settings", "processes", "name", "says"),
    [
        (["train.micro_batch=3"], 1, "settings", "train.micro_batch"),
        (["parallel.tensor=2"], 3, "batch and mesh", "3 processes"),
        (["deepspeed.config=ds.json"], 1, "DeepSpeed", "train_batch_size"),
    ],
)
def test_settings_that_a_run_would_refuse(
    settings: list[str], processes: int, name: str, says: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "ds.json").write_text('{"train_batch_size": 6}')
    loaded = drawbar.load_config(project / "config.yaml", settings)
    findings = list(examine._configuration(loaded, "cpu", processes))
    trouble(find(findings, name), Level.PROBLEM, says)
    assert find(findings, "strategy").level is Level.OK


def test_a_model_that_cannot_be_of_the_hub_and_a_rank_that_is_none(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**RANKS, "RANK": "x", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    loaded = drawbar.load_config(project / "config.yaml", ["task.model=a/b/c", "task.from_scratch=null"])
    report = examine.examine(loaded, True, lambda gpus: 1)
    trouble(find(report.findings, "a/b/c"), Level.PROBLEM, "cannot be a name on the Hugging Face Hub", "check the path")
    trouble(find(report.findings, "ranks"), Level.PROBLEM, "RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers")


@namespaces
def test_every_trouble_is_caused_here(request: pytest.FixtureRequest) -> None:
    doctor_sites.check_all_were_caused(request, "host", "libraries", "network", "storage", "environment", "examine")
