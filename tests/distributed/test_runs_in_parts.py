"""Whole runs that save in parts: the commands read their checkpoints as they read whole tensors, and a run may go from
one layout to the other."""

import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch

from conftest import make_project
from drawbar.checkpoint.format import step_name
from drawbar.checkpoint.inspection import problems
from drawbar.checkpoint.read import open_snapshot, read_state
from drawbar.config.parallel_dims import ParallelDims
from drawbar.distributed.background_messages import BackgroundMessages
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.train import checkpoint_layouts
from drawbar.train.checkpoint_layouts import checkpoint_bytes, choose_layout
from harness import run_cli, run_ranks
from runs import fit_in, losses, scores
from tiny import CPU, tiny_config, tiny_engine

SETTINGS = ("train.steps=4", "checkpoint.every=2", "eval.every=2", "train.micro_batch=2", "optim.schedule=constant")
LAYOUTS = ("whole", "parts")


def train_both(folder: str, strategy: str, steps: int) -> None:
    for layout in LAYOUTS:
        settings = (f"run.name={layout}", f"checkpoint.layout={layout}", f"parallel.strategy={strategy}")
        fit_in(Path(folder), *SETTINGS, *settings, f"train.steps={steps}")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two equal runs of two ranks, one in each layout."""
    folder = make_project(tmp_path_factory.mktemp("layouts"))
    run_ranks(train_both, 2, str(folder), "fsdp", 4)
    return folder


def checkpoint(project: Path, layout: str, step: int) -> Path:
    return project / "runs" / layout / "checkpoints" / step_name(step)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [2, 4])
def test_both_hold_the_same(project: Path, step: int) -> None:
    whole, parts = (open_snapshot(checkpoint(project, layout, step)) for layout in LAYOUTS)
    assert problems(checkpoint(project, "parts", step)) == []
    for one, other in ((whole.model, parts.model), (whole.optimizer, parts.optimizer), (whole.rng, parts.rng)):
        assert one.keys() == other.keys()
        different = [name for name in one if not torch.allclose(one[name], other[name], 0, 0, equal_nan=True)]
        assert different == []
    assert whole.state | {"run": None} == parts.state | {"run": None}  # each has its own id
    assert whole.state["progress"]["evaluated_step"] == step  # the scores were added to a checkpoint that was complete


@pytest.mark.exhaustive
def test_each_rank_has_written_a_part(project: Path) -> None:
    folder = checkpoint(project, "parts", 4)
    written = {path.name for path in folder.glob("*.safetensors")} - {"rng.safetensors"}
    assert written == {f"{kind}-0000{rank}.safetensors" for kind in ("model", "optimizer") for rank in range(2)}
    assert (project / "runs" / "parts" / "checkpoints" / "best.json").exists()


@pytest.mark.exhaustive
def test_commands_read_both(project: Path) -> None:
    """Evaluation, predictions and export of the two runs are the same."""
    found = {}
    for layout in LAYOUTS:
        run = project / "runs" / layout
        for command in (("eval", str(run), "--checkpoint", "2"), ("export", str(run), "--to", str(run / "exported"))):
            done = run_cli(*command, cwd=project)
            assert done.code == 0, done.err
        score_files = sorted((run / "eval").rglob("scores.json"))
        assert score_files
        found[layout] = (
            [path.read_bytes() for path in score_files],
            [path.read_bytes() for path in sorted((run / "exported").rglob("*.safetensors"))],
        )
        assert found[layout][1]
    assert found["whole"] == found["parts"]


def go_on(folder: str, layout: str, strategy: str) -> None:
    for name in LAYOUTS:
        settings = (f"run.name={name}", f"checkpoint.layout={layout}", f"parallel.strategy={strategy}")
        fit_in(Path(folder), *SETTINGS, *settings, "train.steps=6")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "strategy", "layout"), [(1, "single", "parts"), (2, "zero1", "whole")])
def test_a_run_may_change_its_layout(project: Path, tmp_path: Path, ranks: int, strategy: str, layout: str) -> None:
    copy = tmp_path / "project"
    shutil.copytree(project, copy)
    if ranks == 1:
        go_on(str(copy), layout, strategy)
    else:
        run_ranks(go_on, ranks, str(copy), layout, strategy)
    whole, parts = (copy / "runs" / name for name in LAYOUTS)
    assert losses(whole).keys() == set(range(1, 7))
    assert losses(whole) == losses(parts)
    assert scores(whole) == scores(parts)
    assert (read_state(checkpoint(copy, "parts", 6))["progress"]["step"]) == 6
    written = {path.name for path in checkpoint(copy, "whole", 6).glob("model-*.safetensors")}
    assert len(written) == (1 if layout == "whole" else ranks)


def fork(folder: str) -> None:
    with chdir(folder):
        for name in LAYOUTS:
            settings = (*SETTINGS, f"run.name={name}", "parallel.strategy=ddp", "train.steps=6", "optim.lr=0.02")
            fit_in(Path(folder), *settings, resume="2", fork=f"{name}-fork")


@pytest.mark.exhaustive
def test_a_fork_begins_from_either(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "project"
    shutil.copytree(project, copy)
    run_ranks(fork, 2, str(copy))
    whole, parts = (copy / "runs" / f"{name}-fork" for name in LAYOUTS)
    assert losses(whole).keys() == {3, 4, 5, 6}
    assert losses(whole) == losses(parts)


def layouts_of(largest: int) -> tuple[str, str, str]:
    """What ``auto`` becomes, on a shared disk and without one, and ``whole``."""
    info = RankInfo.from_environment()
    config = tiny_config()
    checkpoint_layouts.MAX_WHOLE_BYTES = largest
    with Distributed(info, CPU, 60, ParallelDims.of(config.parallel, info.world_size)) as world:
        engine = tiny_engine(config, world)
        assert checkpoint_bytes(engine) > 0
        asked = (("auto", True), ("auto", False), ("whole", True))
        return tuple(choose_layout(setting, engine, shares_disk) for setting, shares_disk in asked)


def test_auto_writes_in_parts_what_is_large() -> None:
    assert run_ranks(layouts_of, 2, 0) == [("parts", "whole", "whole")] * 2
    assert run_ranks(layouts_of, 2, 2**31) == [("whole", "whole", "whole")] * 2
    assert run_ranks(layouts_of, 1, 0) == [("parts", "whole", "whole")]


def exchange(timeout: int) -> tuple[bool, list[str]]:
    """Rank 0 gets a long message of rank 1, and waits in vain for two others."""
    with Distributed(RankInfo.from_environment(), CPU, timeout) as world:
        messages = BackgroundMessages(world, "test")
        content = bytes(range(256)) * 40_000
        received, reasons = True, []
        with world.working("the test"):  # as the main thread is, while it waits for the background thread
            if world.rank == 1:
                with messages.at_work():
                    messages.send("long", content)
                    messages.send("empty", b"")
            else:
                received = messages.receive("long", 1, "sending") == content
                received = received and messages.receive("empty", 1, "sending") == b""
                for name in ("another", "third"):
                    with pytest.raises(UserError) as caught:
                        messages.receive(name, 1, "writing its part of step 7")
                    reasons.append(caught.value.what)
        world.barrier("the end")
        return received, reasons


@pytest.mark.exhaustive
def test_messages_and_a_rank_that_says_nothing_any_more() -> None:
    """Once one is lost, the next is waited for no longer than it takes to be sure."""
    (received, (first, second)), _ = run_ranks(exchange, 2, 20)
    assert received
    assert "rank 1, which was writing its part of step 7: no heartbeat for 20s" in first
    assert second.endswith("no heartbeat for 10s")
