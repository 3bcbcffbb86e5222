"""Nodes that share no disk: the run directory is that of rank 0, and the others get what they read of it."""

import os
import signal
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch

import drawbar
from conftest import make_project
from drawbar.checkpoint import read
from drawbar.distributed import file_broadcast
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from harness import run_ranks
from runs import fit_in, largest_difference, losses, scores, weights
from tiny import CPU

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


def fit(folder: Path, node: int, settings: list[str], stop_at: int | None = None) -> int | str:
    """Train on a node, whose disk is a folder; the exit code, or why that is refused."""
    os.environ["DRAWBAR_NODE"] = f"n{node}"
    Stopped.forwards, Stopped.stop_at = 0, stop_at
    with chdir(folder / f"node-{node}"):
        loaded = drawbar.load_config("config.yaml", ["train.micro_batch=4", *settings], Stopped.Config)
        try:
            return drawbar.Trainer(loaded.config, Stopped).fit().exit_code
        except UserError as error:
            return str(error)


Turn = tuple[tuple[int, ...], list[str], int | None]
"""The nodes of the ranks, settings, and the step in which the first rank is told to stop."""


def in_turn(folder: str, *turns: Turn) -> list[int | str]:
    torch.set_num_threads(1)
    read._MAX_OPEN_FILES = 1  # part files are opened when they are needed, as those of a large checkpoint
    rank = RankInfo.from_environment().rank
    return [
        fit(Path(folder), nodes[rank], settings, stop_at if rank == 0 else None) for nodes, settings, stop_at in turns
    ]


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"node-{node}" for node in range(2)]
    for node in found:
        node.mkdir()
        make_project(node)
    return found


def test_a_run_goes_on_where_rank_0_is(tmp_path: Path, nodes: list[Path]) -> None:
    alone = make_project(tmp_path)
    fit_in(alone)
    whole, (run, other) = alone / "runs" / "tiny", [node / "runs" / "tiny" for node in nodes]
    ddp = ["parallel.strategy=ddp"]
    assert run_ranks(in_turn, 2, str(tmp_path), ((0, 1), ddp, 5), env=APART) == [[75]] * 2
    for (refused,) in run_ranks(in_turn, 2, str(tmp_path), ((1, 0), ddp, None), env=APART):
        assert "the newest checkpoint of this run, of step 5, is on n0, not on n1, where rank 0 is now" in str(refused)
    assert run_ranks(in_turn, 2, str(tmp_path), ((0, 1), ddp, None), env=APART) == [[0]] * 2
    assert largest_difference(losses(whole), losses(run)) < 1e-5
    assert scores(run).keys() == scores(whole).keys()
    for name, tensor in weights(whole, 12).items():
        torch.testing.assert_close(weights(run, 12)[name], tensor, atol=1e-5, rtol=1e-4)
    assert sorted(path.name for path in other.iterdir()) == ["checkpoints", "logs"]
    assert not list((other / "checkpoints").iterdir())  # what it was sent is gone
    assert not [path for node in nodes for path in (node / "runs").iterdir() if path.name not in (".cache", "tiny")]


STRATEGIES = [
    ["strategy=zero1"],
    ["strategy=fsdp"],
    ["tensor=2"],
    ["pipeline=2"],
    ["strategy=deepspeed", "zero_stage=1", "pipeline=2"],
    ["strategy=deepspeed", "zero_stage=3"],
]


@pytest.mark.exhaustive
def test_every_strategy_goes_on(tmp_path: Path, nodes: list[Path]) -> None:
    alone = make_project(tmp_path)
    fit_in(alone, "train.steps=4")
    turns: list[Turn] = []
    for number, settings in enumerate(STRATEGIES):
        each = [f"run.name=run-{number}", *(f"parallel.{setting}" for setting in settings)]
        turns += [((0, 1), [*each, f"train.steps={steps}", "optim.schedule_steps=4"], None) for steps in (2, 4)]
    assert run_ranks(in_turn, 2, str(tmp_path), *turns, env=APART) == [[0] * len(turns)] * 2
    expected = losses(alone / "runs" / "tiny")
    for number, settings in enumerate(STRATEGIES):
        found = losses(nodes[0] / "runs" / f"run-{number}")
        assert largest_difference(expected, found) < 1e-5, settings


@pytest.mark.exhaustive
def test_the_model_of_another_run_is_sent_to_the_other_nodes(tmp_path: Path, nodes: list[Path]) -> None:
    fit_in(nodes[0], "run.name=before", "train.steps=3")
    tuned = ["parallel.strategy=fsdp", "task.model=runs/before@latest", "task.from_scratch=null", "task.tokenizer=null"]
    turns: list[Turn] = [((0, 1), [*tuned, f"train.steps={steps}"], None) for steps in (3, 4)]
    assert run_ranks(in_turn, 2, str(tmp_path), *turns, env=APART) == [[0, 0]] * 2
    assert not list((nodes[1] / "runs" / "tiny").glob("initial*"))


def test_parts_need_a_shared_disk(tmp_path: Path, nodes: list[Path]) -> None:
    turn: Turn = ((0, 1), ["parallel.strategy=fsdp", "checkpoint.layout=parts"], None)
    for (refused,) in run_ranks(in_turn, 2, str(tmp_path), turn, env=APART):
        assert "the nodes share no disk" in str(refused)
        assert "checkpoint.layout=whole" in str(refused)
    assert not [path for node in nodes for path in node.glob("runs/*")]


def send_files(folder: str) -> list[str]:
    """Files of all sizes, in small chunks; the second time one disk is full, and then one cannot be read."""
    file_broadcast._CHUNK = 7
    with Distributed(RankInfo.from_environment(), CPU, 30) as world:
        own = Path(folder) / f"disk-{world.rank}"
        broadcast = file_broadcast.FileBroadcast(world, [1, 2])
        sizes = {str(size): size for size in (0, 1, 7, 8, 50)}
        errors = []
        for place, wanted in (
            (own, sizes),
            (own / ("missing" if world.rank == 2 else "."), sizes),
            (own, {"60": 60, **sizes}),
        ):
            try:
                broadcast.send(place, wanted)
                errors.append("")
            except OSError as error:
                errors.append(f"{error.filename}")
        return errors


def test_files_are_sent_whole_though_a_disk_fails(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"disk-{rank}").mkdir()
    for size in (0, 1, 7, 8, 50):
        (tmp_path / "disk-0" / str(size)).write_bytes(os.urandom(size))
    source, one, two = run_ranks(send_files, 3, str(tmp_path))
    assert (source[:2], one, two[0], two[2]) == (["", ""], ["", "", ""], "", "")
    assert source[2].endswith("60")
    assert two[1].endswith("missing/0")
    for rank in (1, 2):
        for size in (0, 1, 7, 8, 50):
            assert (tmp_path / f"disk-{rank}" / str(size)).read_bytes() == (
                tmp_path / "disk-0" / str(size)
            ).read_bytes()
