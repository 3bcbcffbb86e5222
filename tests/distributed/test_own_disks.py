"""Two nodes that share no disk: a run goes on whichever comes first, and says so where a checkpoint is missing."""

import os
import shutil
import signal
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch

import drawbar
from conftest import make_project
from drawbar.errors import UserError
from drawbar.runtime.env import Place
from harness import run_ranks
from runs import fit_in, largest_difference, losses, metrics, weights

APART = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class Stopped(drawbar.CausalLM):
    """causal_lm that a scheduler wants to stop in a step."""

    stop_at: int | None = None
    forwards = 0

    def forward(self, model: Any, batch: Any) -> Any:
        Stopped.forwards += model.training
        if Stopped.forwards == Stopped.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
            Stopped.stop_at = None
        return super().forward(model, batch)


def fit(folder: Path, node: int, stop_at: int | None = None) -> int:
    """Train on a node, whose disk is a folder."""
    Stopped.forwards, Stopped.stop_at = 0, stop_at
    with chdir(folder / f"node-{node}"):
        loaded = drawbar.load_config("config.yaml", ["parallel.strategy=ddp", "train.micro_batch=4"], Stopped.Config)
        return drawbar.Trainer(loaded.config, Stopped).fit().exit_code


def train_here_and_there(folder: str) -> list[int]:
    torch.set_num_threads(1)
    rank = Place.from_environment().rank
    codes = []
    for first, stop_at in ((0, 5), (1, 2), (1, 1), (0, None)):
        node = rank ^ first
        os.environ["DRAWBAR_NODE"] = f"n{node}"
        codes.append(fit(Path(folder), node, stop_at))
    return codes


def test_the_first_node_changes(tmp_path: Path) -> None:
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
        make_project(tmp_path / f"node-{node}")
    assert run_ranks(train_here_and_there, 2, str(tmp_path), env=APART) == [[75, 75, 75, 0]] * 2
    run = tmp_path / "node-0" / "runs" / "tiny"
    alone = make_project(tmp_path)
    fit_in(alone)
    whole = alone / "runs" / "tiny"
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(whole)]
    assert largest_difference(losses(whole), losses(run)) < 1e-5
    for name, tensor in weights(whole, 12).items():
        torch.testing.assert_close(weights(run, 12)[name], tensor, atol=1e-5, rtol=1e-4)

    other = tmp_path / "node-1" / "runs" / "tiny"
    log = (other / "logs" / "rank-0000.log").read_text()
    assert "the node of rank 0 lacks runs/tiny/checkpoints/step-00000005, and gets it from rank 1's" in log
    assert (other / "saved-by.json").read_text() == '{"step": 12, "host": "n0"}'
    assert not (other / "checkpoints" / "step-00000012").exists()

    shutil.rmtree(tmp_path / "node-0" / "runs")  # a new node: the third
    (code, said), _ = run_ranks(go_on_without_the_first, 2, str(tmp_path), env=APART)
    assert code == 0
    assert (
        "n0 may have step 12, but is not in this job: going on from 8" in (run / "logs" / "rank-0000.log").read_text()
    )
    assert losses(run) == losses(other) | losses(run)
    assert "no node of this job has a checkpoint of runs/tiny: n0 has them, up to step 12" in said


def go_on_without_the_first(folder: str) -> tuple[int, str]:
    """From what the second node has; and where that has none, either."""
    rank = Place.from_environment().rank
    node = Path(folder) / f"node-{rank}"
    os.environ["DRAWBAR_NODE"] = f"n{2 - rank}"
    shutil.copytree(node, kept := node.with_name(f"kept-{rank}"))
    code = fit(Path(folder), rank)
    if rank == 0:
        shutil.rmtree(kept / "runs", ignore_errors=True)
    else:
        shutil.rmtree(kept / "runs" / "tiny" / "checkpoints")
    kept.rename(kept.with_name(f"node-{rank + 2}"))
    try:
        fit(Path(folder), rank + 2)
    except (UserError, RuntimeError) as error:  # the second rank loses the first
        return code, str(error)
    return code, ""
