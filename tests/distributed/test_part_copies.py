"""Checkpoints in parts on nodes that share no disk: each part is on several disks, so some nodes may be lost."""

import errno
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import chdir
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import drawbar
from conftest import make_project
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import step_name
from drawbar.checkpoint.load import open_snapshot
from drawbar.distributed import file_exchange
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from harness import run_cli, run_ranks
from runs import largest_difference, losses
from tiny import CPU

APART = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
SETTINGS = (
    *("parallel.strategy=fsdp", "train.micro_batch=2", "train.global_batch=12", "train.steps=4", "launch.timeout=20"),
    *(
        "optim.schedule=constant",
        "optim.warmup=0",
        "checkpoint.layout=parts",
        "checkpoint.every=2",
        "checkpoint.keep=2",
        "eval.every=2",
    ),
)
END = "train.steps=6"
ALL = (0, 1, 2)


def train_on(folder: str, nodes: Sequence[int], settings: Sequence[str], fault: str, options: dict[str, Any]) -> str:
    """Train on some nodes, each of which has a folder for its disk; return the error, if there is one.

    Args:
        fault: what befalls rank 1 in the save of step 4: ``killed`` before it renames its folder, ``full`` (its disk,
            as it writes its part), ``full for copies``.
    """
    torch.set_num_threads(1)
    rank = RankInfo.from_environment().rank
    os.environ["DRAWBAR_NODE"] = f"n{nodes[rank]}"
    if rank == 1 and fault:
        _plant(fault)
    with chdir(Path(folder) / f"node-{nodes[rank]}"):
        config = drawbar.load_config("config.yaml", [*SETTINGS, *settings]).config
        try:
            drawbar.Trainer(config, **options).fit()
        except UserError as error:
            return str(error)
    return ""


def _plant(fault: str) -> None:
    """Once, in step 4."""
    name, times = step_name(4), count()
    if fault == "killed":
        finish_write = CheckpointDirectory.finish_write

        def die(self: CheckpointDirectory, folder: str, write_content: Any) -> None:
            if folder == name:
                os.kill(os.getpid(), signal.SIGKILL)
            finish_write(self, folder, write_content)

        CheckpointDirectory.finish_write = die
        return
    victim = "model-00001.safetensors.sums" if fault == "full" else "model-00000.safetensors"
    write_bytes = Path.write_bytes

    def fail(self: Path, data: bytes) -> int:
        if self.parent.name == f"{name}.tmp" and self.name == victim and next(times) == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write_bytes(self, data)

    Path.write_bytes = fail


def run(folder: Path, *settings: str, nodes: Sequence[int] = ALL, fault: str = "", **options: Any) -> list[str]:
    for node in nodes:
        project = folder / f"node-{node}"
        if not project.exists():
            project.mkdir()
            make_project(project)
    env = {} if len(nodes) == 1 else APART
    return run_ranks(train_on, len(nodes), str(folder), nodes, settings, fault, options, env=env)


def checkpoint(folder: Path, node: int, step: int) -> Path:
    return folder / f"node-{node}" / "runs" / "tiny" / "checkpoints" / step_name(step)


def steps(folder: Path, node: int) -> list[str]:
    return sorted(path.name for path in checkpoint(folder, node, 4).parent.iterdir() if path.is_dir())


def parts(folder: Path) -> set[str]:
    """The ranks whose parts of the model are in a checkpoint's folder."""
    return {path.name[6:11] for path in folder.glob("model-*.safetensors")}


def log(folder: Path, node: int, rank: int) -> str:
    return (folder / f"node-{node}" / "runs" / "tiny" / "logs" / f"rank-{rank:04d}.log").read_text()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three nodes that has made 4 of 6 steps, with two copies of each part."""
    folder = tmp_path_factory.mktemp("begun")
    assert run(folder) == ["", "", ""]
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses, and the weights at the end, of a run on one node that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, END, "checkpoint.layout=whole", "parallel.strategy=auto", nodes=[0]) == [""]
    return losses(folder / "node-0" / "runs" / "tiny"), dict(open_snapshot(checkpoint(folder, 0, 6)).model)


@pytest.fixture
def project(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "project")


def check_end(folder: Path, nodes: Sequence[int], expected: tuple[dict[int, float], dict[str, torch.Tensor]]) -> None:
    """The run has come to the end that it would have come to; its disks have the last checkpoint together."""
    found = losses(folder / f"node-{nodes[0]}" / "runs" / "tiny")
    assert {5, 6} <= found.keys()  # those before are lost with the node of rank 0
    assert largest_difference({step: expected[0][step] for step in found}, found) < 1e-4
    merged = folder / "merged" / step_name(6)
    for node in nodes:
        left = [name for name in steps(folder, node) if name.endswith((".tmp", ".deleting", ".replaced"))]
        assert not left
        assert step_name(2) not in steps(folder, node)  # of which some disks had parts only
        shutil.copytree(checkpoint(folder, node, 6), merged, dirs_exist_ok=True)
    weights = open_snapshot(merged).model
    for name, tensor in expected[1].items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-4, rtol=1e-3)


def test_each_disk_has_its_part_and_a_copy_of_another(begun: Path) -> None:
    for step in (2, 4):
        found = [checkpoint(begun, node, step) for node in ALL]
        assert [parts(folder) for folder in found] == [{"00000", "00002"}, {"00000", "00001"}, {"00001", "00002"}]
        assert len({(folder / "manifest.json").read_bytes() for folder in found}) == 1
        for name in {path.name for folder in found for path in folder.iterdir()}:
            copies = {(folder / name).read_bytes() for folder in found if (folder / name).exists()}
            assert len(copies) == 1, name
    assert [steps(begun, node) for node in ALL] == [[step_name(2), step_name(4)]] * 3


def test_commands_say_what_is_elsewhere(project: Path) -> None:
    cwd = project / "node-1"
    listed = run_cli("checkpoint", "list", "runs/tiny", cwd=cwd)
    assert "2 part files on other nodes' disks" in listed.out
    verified = run_cli("checkpoint", "verify", "runs/tiny", "--step", "4", cwd=cwd)
    assert verified.code == 0, verified.out + verified.err
    assert "on other nodes' disks, to be verified there: 2 part files" in verified.out
    exported = run_cli("export", "runs/tiny", "--checkpoint", "4", "--to", "exported", cwd=cwd)
    assert exported.code == 2
    assert "parts of it are on other nodes' disks: model-00002.safetensors, optimizer-00002.safetensors" in exported.err
    assert "copy the files of that folder from the other nodes into it" in exported.err
    shutil.copytree(checkpoint(project, 0, 4), checkpoint(project, 1, 4), dirs_exist_ok=True)
    assert "every byte" in run_cli("checkpoint", "verify", "runs/tiny", "--step", "4", cwd=cwd).out
    (checkpoint(project, 1, 2) / "model-00000.safetensors").unlink()
    (checkpoint(project, 1, 2) / "model-00001.safetensors").unlink()
    assert "damaged: model-0000" in run_cli("checkpoint", "list", "runs/tiny", cwd=cwd).out


@pytest.mark.parametrize("lost", ALL)
def test_any_node_may_be_lost_and_replaced(lost: int, project: Path, expected: Any) -> None:
    shutil.rmtree(project / f"node-{lost}")
    nodes = (*(node for node in ALL if node != lost), 3)
    assert run(project, END, nodes=nodes[::-1] if lost else nodes) == ["", "", ""]
    assert all(parts(checkpoint(project, node, 4)) == {"00000", "00001", "00002"} for node in nodes)
    check_end(project, nodes[::-1] if lost else nodes, expected)


def test_a_run_goes_on_with_fewer_nodes(project: Path, expected: Any) -> None:
    shutil.rmtree(project / "node-0")
    assert run(project, END, "checkpoint.copies=3", nodes=(2, 1)) == ["", ""]
    assert "are to be on 3 disks, and the nodes have 2" in log(project, 2, 0)
    assert parts(checkpoint(project, 1, 6)) == parts(checkpoint(project, 2, 6)) == {"00000", "00001"}
    check_end(project, (2, 1), expected)


def test_nodes_of_which_some_share_a_disk(tmp_path: Path, expected: Any) -> None:
    assert run(tmp_path, nodes=(0, 1, 1)) == ["", "", ""]
    assert parts(checkpoint(tmp_path, 0, 4)) == parts(checkpoint(tmp_path, 1, 4)) == {"00000", "00001", "00002"}
    shutil.rmtree(tmp_path / "node-0")
    assert run(tmp_path, END, nodes=(1, 1, 2)) == ["", "", ""]
    check_end(tmp_path, (1, 2), expected)


def test_a_fork_of_an_older_step(project: Path, expected: Any) -> None:
    assert run(project, END, resume="2", fork="branch") == ["", "", ""]
    assert losses(project / "node-0" / "runs" / "branch").keys() == {3, 4, 5, 6}
    assert parts(checkpoint(project, 0, 2)) == {"00000", "00001", "00002"}


def test_two_of_three_may_be_lost_with_three_copies(tmp_path: Path, expected: Any) -> None:
    assert run(tmp_path, "checkpoint.copies=3") == ["", "", ""]
    shutil.rmtree(tmp_path / "node-0")
    shutil.rmtree(tmp_path / "node-2")
    assert run(tmp_path, END, nodes=[1]) == [""]
    check_end(tmp_path, [1], expected)


def test_without_copies_a_lost_node_costs_what_is_in_parts(tmp_path: Path, expected: Any) -> None:
    assert run(tmp_path, "checkpoint.layout=whole", "train.steps=2") == ["", "", ""]
    assert run(tmp_path, "checkpoint.copies=1") == ["", "", ""]
    shutil.copytree(tmp_path / "node-1", tmp_path / "node-3")
    shutil.rmtree(tmp_path / "node-2")
    assert run(tmp_path, END, "checkpoint.copies=1", nodes=(0, 1)) == ["", ""]
    assert "no node's disk has an intact model-00002.safetensors" in log(tmp_path, 0, 0)
    assert step_name(4) + ".unusable" in steps(tmp_path, 0)
    check_end(tmp_path, (0, 1), expected)

    shutil.rmtree(checkpoint(tmp_path, 3, 2))  # now there is no older one
    for error in run(tmp_path, END, nodes=(3, 4)):
        assert "step-00000004: parts of it are on other nodes' disks: model-00000.safetensors" in error


def test_killed_between_the_renames_of_two_disks(tmp_path: Path, expected: Any) -> None:
    with pytest.raises(AssertionError):
        run(tmp_path, "launch.timeout=10", fault="killed")
    assert [steps(tmp_path, node)[1:] for node in ALL] == [[step_name(4)], [step_name(4) + ".tmp"], [step_name(4)]]
    shutil.rmtree(tmp_path / "node-2")
    assert run(tmp_path, END) == ["", "", ""]
    assert "resumed from runs/tiny/checkpoints/step-00000004" in log(tmp_path, 0, 0)
    check_end(tmp_path, ALL, expected)


def test_evaluated_on_some_disks_only(project: Path, expected: Any) -> None:
    """The run was killed between two disks that add the scores of a step to its checkpoint."""
    for node in ALL[:2]:
        CheckpointDirectory(checkpoint(project, node, 4).parent).update_state(4, {"note": "added"})
    assert parts(checkpoint(project, 0, 4)) == {"00000", "00002"}
    assert run(project, END) == ["", "", ""]
    assert len({(checkpoint(project, node, 4) / "manifest.json").read_bytes() for node in ALL}) == 1
    check_end(project, ALL, expected)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def test_a_damaged_copy_is_replaced_by_an_intact_one(project: Path, expected: Any) -> None:
    flip(checkpoint(project, 0, 4) / "model-00000.safetensors")
    flip(checkpoint(project, 1, 4) / "model-00001.safetensors.sums")
    flip(checkpoint(project, 2, 4) / "tensors.json")
    (checkpoint(project, 1, 4) / "manifest.json").unlink()
    assert run(project, END) == ["", "", ""]
    assert "step-00000004: model-00000.safetensors" in log(project, 0, 0)
    check_end(project, ALL, expected)

    for node in (0, 1):  # both copies
        flip(checkpoint(project, node, 6) / "optimizer-00000.safetensors")
    assert run(project, "train.steps=8") == ["", "", ""]
    assert "step-00000006 cannot be put together: no node's disk has an intact optimizer-00000" in log(project, 0, 0)
    assert "resumed from runs/tiny/checkpoints/step-00000004" in log(project, 0, 0)


@pytest.mark.parametrize("fault", ["full", "full for copies"])
def test_a_disk_that_is_full(fault: str, tmp_path: Path, expected: Any) -> None:
    """The save fails on all disks, and the next one succeeds on all."""
    settings = (END, "checkpoint.on_error=warn", "checkpoint.keep=1")
    assert run(tmp_path, *settings, fault=fault) == ["", "", ""]
    assert [steps(tmp_path, node) for node in ALL] == [[step_name(6)]] * 3
    assert "the save of step 4 failed, and the run goes on" in log(tmp_path, 0, 0)
    assert os.strerror(errno.ENOSPC) in log(tmp_path, 0, 0)
    check_end(tmp_path, ALL, expected)


def test_what_is_refused(tmp_path: Path) -> None:
    for error in run(tmp_path, "checkpoint.copies=4"):
        assert "parts of checkpoints are to be on 4 disks, and the nodes have 3" in error
        assert "set checkpoint.copies=3" in error
    for error in run(tmp_path, "checkpoint.remote=file://store"):
        assert "on 3 disks here, and none of them would have all parts" in error
    assert not [path for node in ALL for path in (tmp_path / f"node-{node}").glob("runs/tiny/*")]


def exchange_files(folder: str) -> tuple[list[str], str]:
    """Files of all sizes go round among three disks, in small chunks, and then again where one disk is full."""
    file_exchange._CHUNK = 7
    with Distributed(RankInfo.from_environment(), CPU, 30) as world:
        own = Path(folder) / f"disk-{world.rank}"
        targets = [rank for rank in range(3) if rank != world.rank]
        exchange = file_exchange.FileExchange(world, [0, 1, 2])
        for target in targets:
            for size in (0, 1, 7, 8, 50 * (world.rank + 1)):
                (own / f"{world.rank}-{target}-{size}").write_bytes(bytes([world.rank + 1]) * size)
        outgoing = {target: sorted(own.glob(f"*-{target}-*")) for target in targets if target != 0 or world.rank == 1}
        received = exchange.exchange(outgoing, own / "received")
        try:
            exchange.exchange(outgoing, own / ("received" if world.rank != 2 else "missing"))
            error = ""
        except OSError as fault:
            error = str(fault.filename)
        return sorted(path.name for path in received), error


def test_files_go_round(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"disk-{rank}" / "received").mkdir(parents=True)
    found = run_ranks(exchange_files, 3, str(tmp_path))
    sources = {0: [1], 1: [0, 2], 2: [0, 1]}
    for target, (names, error) in enumerate(found):
        assert names == sorted(
            f"{rank}-{target}-{size}" for rank in sources[target] for size in (0, 1, 7, 8, 50 * (rank + 1))
        )
        for name in names:
            folders = tmp_path / f"disk-{name[0]}", tmp_path / f"disk-{target}" / "received"
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
        assert ("missing" in error) == (target == 2)
