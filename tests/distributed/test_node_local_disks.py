"""Nodes that share no disk: each has every checkpoint, so any of them may come first, or be lost."""

import os
import shutil
import signal
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch

import drawbar
from conftest import make_project
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.train.node_local import find_start_on_all_disks
from drawbar.train.rundir import find_start
from drawbar.train.shared_disks import Disks, find_shared_disks
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


def fit(folder: Path, node: int, stop_at: int | None = None) -> int:
    """Train on a node, whose disk is a folder."""
    Stopped.forwards, Stopped.stop_at = 0, stop_at
    with chdir(folder / f"node-{node}"):
        loaded = drawbar.load_config("config.yaml", ["parallel.strategy=ddp", "train.micro_batch=4"], Stopped.Config)
        return drawbar.Trainer(loaded.config, Stopped).fit().exit_code


def in_turn(folder: str, *turns: tuple[tuple[int, int], int | None]) -> list[int]:
    """What each turn ended with: the nodes of the two ranks, and the step in which the first one is told to stop."""
    torch.set_num_threads(1)
    rank = RankInfo.from_environment().rank
    codes = []
    for nodes, stop_at in turns:
        os.environ["DRAWBAR_NODE"] = f"n{nodes[rank]}"
        codes.append(fit(Path(folder), nodes[rank], stop_at if rank == 0 else None))
    return codes


def test_any_node_may_come_first_or_be_lost(tmp_path: Path) -> None:
    alone = make_project(tmp_path)
    fit_in(alone)
    whole = alone / "runs" / "tiny"
    nodes = [tmp_path / f"node-{node}" for node in range(3)]
    for node in nodes:
        node.mkdir()
        make_project(node)
    runs = [node / "runs" / "tiny" for node in nodes]
    turns = ((0, 1), 5), ((1, 0), 2), ((1, 0), 1)
    assert run_ranks(in_turn, 2, str(tmp_path), *turns, env=APART) == [[75, 75, 75]] * 2
    steps = list(range(1, 13))
    assert list(losses(runs[1])) == steps[:8]
    assert list(losses(runs[0])) == steps[:7]  # of the last turn, as it began
    assert manifests(runs[0]) == manifests(runs[1])
    log = (runs[0] / "logs" / "rank-0000.log").read_text()
    assert log.count("none has a checkpoint of this run: it begins anew") == 1
    assert "lacks" not in log

    told = runs[0] / "tracking" / "mine.json"  # which run a tracker's service knows, and up to which step
    told.parent.mkdir()
    told.write_text("{}")
    shutil.rmtree(nodes[1])  # a new one takes its place
    assert run_ranks(in_turn, 2, str(tmp_path), ((2, 0), None), env=APART) == [[0], [0]]
    found = losses(runs[2])
    assert list(found) == [step for step in steps if step != 8]
    assert largest_difference({step: losses(whole)[step] for step in found}, found) < 1e-5
    assert scores(runs[2]).keys() == scores(whole).keys()
    log = (runs[2] / "logs" / "rank-0000.log").read_text()
    assert "the disk of rank 0 lacks runs/tiny/checkpoints/step-00000008, and gets it from rank 1" in log
    for run in (runs[0], runs[2]):
        for name, tensor in weights(whole, 12).items():
            torch.testing.assert_close(weights(run, 12)[name], tensor, atol=1e-5, rtol=1e-4)
        assert CheckpointDirectory(run / "checkpoints").best() is not None
    assert manifests(runs[0]) == manifests(runs[2])
    assert (runs[2] / "tracking" / "mine.json").read_text() == "{}"


STRATEGIES = [
    ["strategy=zero1"],
    ["strategy=fsdp"],
    ["tensor=2"],
    ["pipeline=2"],
    ["strategy=deepspeed", "zero_stage=1", "pipeline=2"],
    ["strategy=deepspeed", "zero_stage=3"],
]


def save_with_all(folder: str) -> None:
    rank = RankInfo.from_environment().rank
    os.environ["DRAWBAR_NODE"] = f"n{rank}"
    for number, settings in enumerate(STRATEGIES):
        parallel = [f"parallel.{setting}" for setting in settings]
        fit_in(Path(folder) / f"node-{rank}", *parallel, f"run.name=run-{number}", "train.steps=3")


def test_every_disk_gets_whole_checkpoints(tmp_path: Path) -> None:
    """Of every strategy; what rank 0 writes is compared with one process elsewhere."""
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
        make_project(tmp_path / f"node-{node}")
    run_ranks(save_with_all, 2, str(tmp_path), env=APART)
    for number, settings in enumerate(STRATEGIES):
        first, second = (manifests(tmp_path / f"node-{node}" / "runs" / f"run-{number}") for node in range(2))
        assert list(first) == ["step-00000003"], settings
        assert first == second, settings


def look_at(folder: str) -> Disks:
    place = RankInfo.from_environment()
    with Distributed(place, CPU, 60) as world:
        return find_shared_disks(Path(folder) / f"disk-{place.rank // 2}", world)


def test_some_nodes_share_a_disk(tmp_path: Path) -> None:
    """One rank writes for each disk, and nothing is left of how that was found out."""
    found = run_ranks(look_at, 4, str(tmp_path), env=APART)
    assert found == [Disks(rank, (0, 0, 2, 2)) for rank in range(4)]
    assert [disks.is_disk_leader for disks in found] == [True, False, True, False]
    assert (found[0].disk_leaders, found[0].ranks_by_disk) == ((0, 2), ((0, 1), (2, 3)))
    assert [list(disk.iterdir()) for disk in sorted(tmp_path.iterdir())] == [[], []]


def begin(folder: str, *cases: str) -> list[tuple[str, list[str]]]:
    """Of each case: the checkpoint that a rank would begin with, or why it cannot, and what it has to set aside."""
    rank = RankInfo.from_environment().rank
    os.environ["DRAWBAR_NODE"] = f"n{rank}"
    found = []
    with Distributed(RankInfo.from_environment(), CPU, 60) as world:
        for case in cases:
            with chdir(Path(folder) / case / f"node-{rank}"):
                config = drawbar.load_config("config.yaml").config
                disks = find_shared_disks(Path("runs"), world)
                try:
                    start = find_start_on_all_disks(
                        lambda config=config: find_start(config, "auto", None), disks, world
                    )
                    found.append((str(start.checkpoint), [path.name for path in start.unusable]))
                except UserError as error:
                    found.append((error.what, []))
    return found


def test_a_disk_whose_checkpoints_are_damaged(tmp_path: Path) -> None:
    """Another disk's are as good; a run is only refused where no disk has one."""
    for case in ("another has it", "only one has it", "none has one"):
        for node in range(2):
            (tmp_path / case / f"node-{node}").mkdir(parents=True)
            make_project(tmp_path / case / f"node-{node}")
    whole = tmp_path / "another has it" / "node-0"
    fit_in(whole)
    for case, node in (("another has it", 1), ("only one has it", 0), ("none has one", 0)):
        shutil.copytree(whole / "runs", tmp_path / case / f"node-{node}" / "runs")
    newest = [tmp_path / case / "node-0/runs/tiny/checkpoints/step-00000012" for case in os.listdir(tmp_path)]
    for folder in (*newest, *(tmp_path / "none has one").glob("node-0/runs/tiny/checkpoints/step-*")):
        (folder / "optimizer.safetensors").write_bytes(b"")

    one, other = run_ranks(begin, 2, str(tmp_path), "another has it", "only one has it", "none has one", env=APART)
    assert one[0] == other[0] == ("runs/tiny/checkpoints/step-00000012", [])
    assert manifests(whole / "runs/tiny").keys() == {"step-00000008", "step-00000010", "step-00000012"}
    assert CheckpointDirectory(whole / "runs/tiny/checkpoints").latest().name == "step-00000012"
    assert one[1] == ("runs/tiny/checkpoints/step-00000010", ["step-00000012"])
    assert other[1] == ("runs/tiny/checkpoints/step-00000010", [])
    assert "no checkpoint of the run can be used" in one[2][0]
    assert one[2] == other[2]


def manifests(run: Path) -> dict[str, str]:
    """The checkpoints of a run, with their checksums."""
    return {path.parent.name: path.read_text() for path in (run / "checkpoints").glob("*/manifest.json")}
