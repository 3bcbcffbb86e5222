"""``--hosts gpu1,gpu2`` without slots: the hosts say how many GPUs they have, as ``drawbar train`` would find them."""

import json
import os
from pathlib import Path

import pytest

import drawbar
from harness import Finished, run_cli
from messages import check_one_message
from sshd import Sshd

TORCH = """\
import os
class cuda:
    device_count = staticmethod(lambda: len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")))
"""


@pytest.fixture
def hosts(sshd: Sshd, tmp_path: Path) -> list[str]:
    """Settings for hosts with eight GPUs: those of a torch that says so."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "torch.py").write_text(TORCH)
    path = os.pathsep.join([str(tmp_path / "library"), str(Path(drawbar.__file__).parents[1])])
    return [
        f"cluster.ssh_config={sshd.config}",
        f"cluster.environment={json.dumps({'PYTHONPATH': path})}",
        "cluster.setup=[echo welcome, echo to this machine >&2]",
        "device=auto",
        "train.global_batch=16",
        "train.micro_batch=1",
    ]


def submit(project: Path, *arguments: str, **env: str) -> Finished:
    return run_cli("submit", "config.yaml", *arguments, "--dry-run", cwd=project, env=env)


def test_hosts_are_asked_for_their_gpus(project: Path, hosts: list[str]) -> None:
    done = submit(project, *hosts, "--hosts", "gpu1,gpu2")
    assert done.code == 0, done.err
    assert "#   nproc: 8\n" in done.out
    assert "GPUs of the hosts: gpu1 has 8, gpu2 has 8" in done.err
    # a variable that the run would have there counts
    forward = "cluster.forward=[CUDA_VISIBLE_DEVICES]"
    done = submit(project, *hosts, "--hosts", "gpu1", forward, CUDA_VISIBLE_DEVICES="4,5")
    assert "#   nproc: 2\n" in done.out, done.err


def test_hosts_that_do_not_agree(project: Path, hosts: list[str]) -> None:
    done = submit(project, *hosts, "--hosts", "gpu1,gpu2:4")
    assert (done.code, done.out) == (2, "")
    check_one_message(done.err, "gpu1 has 8, gpu2 has 4", "set launch.nproc=4")
    told = submit(project, *hosts, "--hosts", "gpu1,gpu2:4", "launch.nproc=4")
    assert told.code == 0, told.err


def test_hosts_that_cannot_be_asked(project: Path, hosts: list[str]) -> None:
    done = submit(project, *hosts, "--hosts", "gpu1,stranger,nobody")
    assert (done.code, done.out) == (1, "")
    check_one_message(
        done.err, "host stranger: ssh cannot reach it: ", "host nobody: ssh cannot", "asked for their GPUs"
    )
    done = submit(project, *hosts, "--hosts", "gpu1", "cluster.python=/no/such/python")
    check_one_message(done.err, "host gpu1: drawbar does not start there, exit code 127", "set cluster.python")


@pytest.mark.parametrize(
    "setting", ["device=cpu", "parallel.strategy=single", "launch.nproc=1", "cluster.gpus_per_node=1"]
)
def test_hosts_are_not_asked_what_need_not_be_known(project: Path, setting: str) -> None:
    device = [] if setting.startswith("device") else ["device=auto"]
    done = submit(project, "--hosts", "gpu1", setting, *device, PATH="/nowhere")
    assert done.code == 0, done.err
    assert "#   nproc: 1\n" in done.out
