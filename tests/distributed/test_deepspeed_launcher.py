"""DeepSpeed's own launcher: its runs are those of one process, and its errors and exit codes are drawbar's.

That they are those of ``drawbar train launch.nproc=2``, bit for bit, is what tests/docs/test_deepspeed_guide.py sees.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import make_project
from harness import Finished, free_port, run_deepspeed
from messages import check_one_message
from runs import Fit, largest_difference, losses

SECONDS = 300
TASK = '''
import os, signal
import drawbar
from drawbar.distributed.rank_info import RankInfo

PLACE = RankInfo.from_environment()
FATE = os.environ.get("FATE")


class Mine(drawbar.CausalLM):
    """causal_lm that meets its fate on rank 1, at its seventh step."""

    forwards = 0

    def forward(self, model, batch):
        self.forwards += model.training
        if self.forwards == 7 and PLACE.rank == 1:
            if FATE == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            if FATE == "raise":
                raise ValueError(f"planted in {PLACE}")
        return super().forward(model, batch)


if __name__ == "__main__":
    drawbar.main(Mine)
'''
SETTINGS = ("eval.every=null", "checkpoint.every=100")


@pytest.fixture
def mine(project: Path) -> Path:
    """A project with a task of its own."""
    (project / "mine.py").write_text(TASK)
    return project


def deepspeed(*arguments: str, cwd: Path, fate: str = "", port: int | None = None) -> Finished:
    chosen = [] if port is None else [f"--master_port={port}"]
    return run_deepspeed("--quiet", *chosen, *arguments, cwd=cwd, env={"FATE": fate})


@pytest.mark.exhaustive
def test_a_run_on_two_nodes_that_goes_on_on_one(mine: Path, fit: Fit) -> None:
    """Both nodes are this machine. A scheduler's signal to one rank saves the run, and the launchers say so."""
    (mine / "hosts").write_text("one slots=1\ntwo slots=1\n")
    script = ("mine.py", "train", "config.yaml", "parallel.strategy=deepspeed", *SETTINGS)
    nodes = ("--hostfile=hosts", "--no_ssh", "--master_addr=127.0.0.1")
    port = free_port()

    def on(node: int) -> Finished:
        return deepspeed(*nodes, f"--node_rank={node}", *script, cwd=mine, fate="signal", port=port)

    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(on, (0, 1)))
    for done in ended:
        assert done.code == 75, done.out + done.err
    saved = mine / "runs" / "tiny" / "checkpoints"
    assert [path.name for path in saved.glob("step-*")] == ["step-00000007"]

    done = deepspeed("--num_gpus=2", *script, cwd=mine)
    assert done.code == 0, done.out + done.err
    fit("run.name=alone", "eval.every=null")
    found = losses(mine / "runs" / "tiny")
    assert len(found) == 12
    assert largest_difference(losses(mine / "runs" / "alone"), found) < 1e-5


@pytest.mark.exhaustive
def test_the_rank_that_raised_speaks_alone(mine: Path) -> None:
    module = ("--num_gpus=2", "--module", "drawbar", "train", "config.yaml", "task.type=mine:Mine", *SETTINGS)
    done = deepspeed(*module, cwd=mine, fate="raise")
    assert done.code == 1, done.out + done.err
    # both processes are on this machine: the launcher says so in other words than torchrun
    planted = "ValueError: planted in RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2)"
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: Mine.forward fails: {planted}"]


@pytest.mark.exhaustive
def test_what_is_wrong_is_told_once(tmp_path: Path) -> None:
    """By the installed command, whose ranks are new interpreters."""
    project = make_project(tmp_path)
    module = ("--num_gpus=2", "--module", "drawbar", "train", "config.yaml", "data.train=trian.txt")
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("deepspeed")), "--quiet", f"--master_port={free_port()}", *module]
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2, done.stdout + done.stderr
    check_one_message(done.stdout + done.stderr, "trian.txt", "data.train", "did you mean train.txt?")
    assert not (project / "runs" / "tiny").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"zero_optimization": {"reduce_bucket_sise": 1}}, "reduce_bucket_sise"),
        ({"data_types": {"keep_in_fp32_modules": 1}}, "keep_in_fp32_modules"),
    ],
)
def test_what_deepspeed_alone_can_refuse_of_a_json_is_one_message(project: Path, values: object, named: str) -> None:
    (project / "ds.json").write_text(json.dumps(values))
    module = ("--num_gpus=2", "--module", "drawbar", "train", "config.yaml", "deepspeed.config=ds.json")
    done = deepspeed(*module, cwd=project)
    assert done.code == 2, done.out + done.err
    check_one_message(done.out + done.err, "DeepSpeed refuses this run", named, "parallel.strategy=deepspeed")
    assert not (project / "runs" / "tiny").exists()
