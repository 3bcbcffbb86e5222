"""What runs on the nodes before the ranks: the way to the first node, a port for the job, the end of a crash loop."""

import base64
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar.config.io.user_code import SNAPSHOT
from drawbar.jobs.node.each_node import CONFIG
from drawbar.jobs.node.first_node import main
from drawbar.jobs.node.network import (
    PORTS,
    address_towards,
    choose_address,
    choose_port,
    find_route,
    interface_address,
    interfaces,
    is_free,
)
from drawbar.jobs.node.restart import MOST_RESTARTS, count_restart
from drawbar.launch.failures import report_failure
from drawbar.launch.rendezvous import VARIABLE, Rendezvous
from drawbar.util.run_dir import newest_step


def test_jobs_look_at_different_ports() -> None:
    ports = [choose_port(str(job), free=lambda port: True) for job in range(1000, 1100)]
    assert len(set(ports)) > 95  # of 17,000; neighbours that meet anyway find the other's port taken
    assert set(ports) <= set(PORTS)


def test_a_port_that_is_taken_is_left_alone() -> None:
    first = choose_port("job")
    assert is_free(first)
    with socket.create_server(("127.0.0.1", first)):
        assert not is_free(first)
        second = choose_port("job")
        assert second != first
    assert choose_port("job") == first
    with pytest.raises(OSError, match="none of 200 ports"):
        choose_port("job", free=lambda port: False)


def test_the_head_says_where_to_meet(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_address("localhost", None) == "127.0.0.1"  # where there is no InfiniBand, as here
    assert main(["localhost", "7"]) == 0
    address, port = capsys.readouterr().out.strip().split(":")
    assert (address, int(port)) == ("127.0.0.1", choose_port("7"))
    assert main(["localhost", "7", "lo"]) == 0
    assert main(["localhost", "7", "nowhere0"]) == 1
    assert "the interface nowhere0 has no IPv4 address" in capsys.readouterr().err
    assert main(["no-such-host.invalid", "7"]) == 1
    assert "fix:" in capsys.readouterr().err


def test_interfaces_of_this_machine() -> None:
    assert interfaces()["lo"] == interface_address("lo") == "127.0.0.1"
    assert address_towards("localhost") == "127.0.0.1"
    assert interface_address("nowhere0") is None


def test_the_way_of_the_libraries() -> None:
    way = find_route("127.0.0.1", {})
    assert (way.address, way.interface) == ("127.0.0.1", "lo")
    assert way.variables["NCCL_SOCKET_IFNAME"] == "lo"  # it would not take lo by itself
    chosen = {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "eth7"}
    assert find_route("127.0.0.1", chosen).variables == {}
    with pytest.raises(OSError, match="Name or service not known"):
        find_route("no-such-host.invalid", {})


def test_a_rendezvous_is_taken_once() -> None:
    rendezvous = Rendezvous("job-7", "10.0.0.1:20000", nodes=2, node=1, address="10.0.0.2")
    environ: dict[str, str] = {}
    rendezvous.to_environment(environ)
    assert list(environ) == [VARIABLE]
    assert Rendezvous.from_environment(environ) == rendezvous
    assert Rendezvous.from_environment(environ) is None


def run_node(endpoint: str, config: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    slurm = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n2",
             "DRAWBAR_NODES": "n1\nn2", CONFIG: base64.b64encode(b"a: 1\n").decode()}  # fmt: skip
    show = [sys.executable, "-c", f"import os; print(os.environ[{VARIABLE!r}])"]
    return subprocess.run(
        [sys.executable, "-m", "drawbar.jobs.node.each_node", endpoint, str(config), *show],
        env={**os.environ, **slurm, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_node_becomes_its_command(tmp_path: Path) -> None:
    """The configuration that came with the job lies where the command looks for it, also on a disk of its own."""
    config = tmp_path / "runs" / "x" / "launch" / "config-7.yaml"
    done = run_node("127.0.0.1:20000", config)
    assert done.returncode == 0, done.stderr
    assert config.read_text() == "a: 1\n"
    assert list(config.parent.iterdir()) == [config]
    said, announced = done.stdout.splitlines()
    assert said.startswith("drawbar: node 2 of 2, n2: meets the others at 127.0.0.1:20000 over lo (127.0.0.1)")
    assert Rendezvous.from_environment({VARIABLE: announced}) == Rendezvous(
        "drawbar-7", "127.0.0.1:20000", 2, 1, "127.0.0.1", ("n1", "n2")
    )


def test_a_node_without_a_folder_or_the_code(tmp_path: Path) -> None:
    done = run_node("127.0.0.1:20000", Path("/dev/null/config-7.yaml"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: node n2 cannot write the configuration of the run")
    done = run_node("127.0.0.1:20000", tmp_path / "config-7.yaml", **{SNAPSHOT: "/no/such/code"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: node n2 has no copy of the code that was submitted: /no/such/code")


def test_a_node_without_a_route(tmp_path: Path) -> None:
    done = run_node("no-such-host.invalid:20000", tmp_path / "config-7.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: node n2 has no route to the first node, no-such-host.invalid")
    assert "fix:" in done.stderr


def test_nothing_on_a_node_imports_torch() -> None:
    """Nor the modules of the configuration."""
    names = ("first_node", "each_node", "restart", "requeue", "ssh_host")
    modules = ", ".join(f"drawbar.jobs.node.{name}" for name in names)
    script = f"import sys, {modules}; print({{'torch', 'pydantic'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_restarts_without_a_new_checkpoint_are_counted(tmp_path: Path) -> None:
    def save(step: int) -> None:
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)

    assert newest_step(tmp_path) == -1
    assert [count_restart(tmp_path, "7") for _ in range(3)] == [0, 1, 2]
    save(0)
    assert [count_restart(tmp_path, "7") for _ in range(2)] == [0, 1]
    save(40)
    (tmp_path / "checkpoints" / "step-00000080.tmp").mkdir()  # never finished
    assert newest_step(tmp_path) == 40
    assert [count_restart(tmp_path, "7") for _ in range(3)] == [0, 1, 2]
    assert count_restart(tmp_path, "8") == 0  # a job of its own


def test_the_fourth_restart_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drawbar.jobs.node.restart", str(tmp_path), "7"]
    done = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(MOST_RESTARTS + 2)]
    assert [finished.returncode for finished in done] == [0] * (MOST_RESTARTS + 1) + [1]
    assert done[-1].stderr.startswith("error: job 7 was restarted 3 times without a new checkpoint; it ends here")
    assert "fix:" in done[-1].stderr


def test_a_report_that_is_cut_off_is_not_there(tmp_path: Path) -> None:
    """torch's launcher fails on half an error file, and a rank may be killed at any moment."""
    path = tmp_path / "error.json"
    program = (
        "import os, resource, signal\n"
        "from drawbar.launch.failures import report_failure\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"  # the kernel kills who writes more
        "resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))\n"
        "report_failure(ValueError('too long for the limit'))\n"
    )
    env = os.environ | {"TORCHELASTIC_ERROR_FILE": str(path)}
    assert subprocess.run([sys.executable, "-c", program], env=env, check=False).returncode == -signal.SIGXFSZ
    assert not path.exists()


@pytest.mark.parametrize("path", ["", os.devnull])
def test_a_launcher_without_error_files(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torchrun --log-dir /dev/null``."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    assert not report_failure(ValueError())
