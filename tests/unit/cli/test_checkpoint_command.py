"""``drawbar checkpoint``, on checkpoints of both formats; and the other commands on a run that was saved in parts."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from conftest import write_text
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot
from drawbar.checkpoint.inspection import summaries
from drawbar.checkpoint.read import read_snapshot
from drawbar.commands.checkpoints import prune_checkpoints
from drawbar.errors import UserError
from drawbar.train.run_dir_lock import lock_run_dir
from drawbar.util.run_dir import LOCK_FILE
from harness import Finished, run_cli
from parts_writing import rewrite_in_parts, state_of, write_parts

CONFIG = """
run: {name: demo}
task:
  type: causal_lm
  model: llama
  from_scratch: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
                 max_position_embeddings: 64, tie_word_embeddings: true}
  tokenizer: {train: byte_bpe, vocab_size: 300}
data: {train: train.txt, validation: valid.txt, sequence_length: 32, batching: packed}
train: {global_batch: 8, steps: 6}
optim: {lr: 1.0e-2}
checkpoint: {every: 2}
eval: {every: 3}
tracking: {tensorboard: false}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 and 3 of whole tensors, 2 and 4 in parts; 1 is the best one."""
    folder = tmp_path / "runs" / "demo"
    directory = CheckpointDirectory(folder / "checkpoints")
    model, optimizer = state_of(random.Random(0))
    for step in (1, 3):
        directory.write(Snapshot(step, model, optimizer, {}, {}))
    for step in (2, 4):
        write_parts(directory, step, model, optimizer)
    directory.set_best(1, "loss", 0.5)
    (folder / "config.yaml").write_text("run: {name: demo}\ncheckpoint: {keep: 2}\n")
    (folder / LOCK_FILE).touch()
    return folder


def checkpoint(run: Path, command: str, *arguments: str, code: int = 0) -> Finished:
    done = run_cli("checkpoint", command, str(run), *arguments, cwd=run.parent)
    assert done.code == code, done.out + done.err
    return done


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def steps(run: Path) -> list[int]:
    return CheckpointDirectory(run / "checkpoints").steps()


def test_list(run: Path) -> None:
    (run / "checkpoints" / "step-00000003" / "rng.safetensors").unlink()
    (run / "checkpoints" / "step-00000009.unusable").mkdir()
    lines = checkpoint(run, "list").out.splitlines()
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [(row[0], *row[3:-3]) for row in rows] == [
        ("1", "best", "complete"),
        ("2", "complete"),
        ("3", "damaged:", "rng.safetensors", "is", "missing"),
        ("4", "complete"),
    ]
    assert [row[-3] for row in rows] == ["1", "3", "1", "3"]
    assert lines[-1].startswith("step-00000009.unusable: ")
    objects = [json.loads(line) for line in checkpoint(run, "list", "--json").out.splitlines()]
    assert [(one["step"], one["best"], one["parts"], one["problem"]) for one in objects] == [
        (1, True, 1, None),
        (2, False, 3, None),
        (3, False, 1, "rng.safetensors is missing"),
        (4, False, 3, None),
    ]


def test_verify(run: Path) -> None:
    assert checkpoint(run, "verify").out.count("every byte is as it was written") == 4
    spoil(run / "checkpoints" / "step-00000003" / "model-00000.safetensors")
    spoil(run / "checkpoints" / "step-00000004" / "optimizer-00001.safetensors")
    spoil(run / "checkpoints" / "step-00000004" / "tensors.json")
    (run / "checkpoints" / "step-00000002" / "notes.txt").touch()
    out = checkpoint(run, "verify", code=1).out
    assert "step-00000003: damaged\n  model-00000.safetensors is not as it was written: bytes " in out
    assert "step-00000004: damaged\n  optimizer-00001.safetensors is not as it was written: bytes " in out
    assert "\n  tensors.json has the checksum" in out
    assert "step-00000002: every byte is as it was written\n  notes.txt is not part of it" in out
    checkpoint(run, "verify", "--step", "2")
    checkpoint(run, "verify", "--step", "4", code=1)
    assert "demo has no checkpoint of step 7" in checkpoint(run, "verify", "--step", "7", code=2).err


def test_prune(run: Path) -> None:
    assert "would delete" in (said := checkpoint(run, "prune", "--dry-run").out)
    assert said.rstrip().endswith("of step 2")  # keep: 2 in config.yaml, and the best one
    assert steps(run) == [1, 2, 3, 4]
    assert "cannot ask for confirmation" in checkpoint(run, "prune", code=2).err
    assert steps(run) == [1, 2, 3, 4]
    checkpoint(run, "prune", "--keep", "1", "--yes")
    assert steps(run) == [1, 4]
    assert checkpoint(run, "prune", "--keep", "1", "--yes").out == "there is nothing to delete\n"


@pytest.mark.exhaustive
def test_prune_deletes_nothing_while_the_run_trains_or_where_the_newest_is_damaged(run: Path) -> None:
    with lock_run_dir(run):
        assert "is being trained now" in checkpoint(run, "prune", "--keep", "1", "--yes", code=2).err
    spoil(run / "checkpoints" / "step-00000004" / "model-00000.safetensors")
    done = checkpoint(run, "prune", "--keep", "1", "--yes", code=2)
    assert "nothing was deleted, as the newest checkpoint is damaged: model-00000.safetensors" in done.err
    assert steps(run) == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["truncated", "no manifest", "missing", "empty"])
def test_prune_keeps_what_a_run_falls_back_on(run: Path, how: str) -> None:
    """Every kind of damage to the newest checkpoint counts, also where its sizes already show it."""
    newest = run / "checkpoints" / "step-00000004"
    if how == "truncated":
        (newest / "model-00000.safetensors").write_bytes(b"")
    elif how == "no manifest":
        (newest / "manifest.json").unlink()
    elif how == "missing":
        (newest / "state.json").unlink()
    else:
        shutil.rmtree(newest)
        newest.mkdir()
    for ways in (("--yes",), ("--dry-run",)):
        with pytest.raises(UserError, match="nothing was deleted, as the newest checkpoint is damaged"):
            prune_checkpoints(run, 1, ways == ("--dry-run",), lambda _: True)
    assert steps(run) == [1, 2, 3]


def test_a_damaged_best_json(run: Path) -> None:
    (run / "checkpoints" / "best.json").write_text("{")
    listed = checkpoint(run, "list")
    assert "best.json is damaged" in listed.err
    assert len([line for line in listed.out.splitlines() if line[:1].isdigit()]) == 4
    assert "best.json: damaged" in checkpoint(run, "verify", code=1).out
    refused = checkpoint(run, "prune", "--keep", "1", "--yes", code=2).err
    assert "nothing was deleted, as best.json is damaged" in refused
    assert "delete that file" in refused
    assert steps(run) == [1, 2, 3, 4]
    (run / "checkpoints" / "best.json").unlink()
    checkpoint(run, "prune", "--keep", "1", "--yes")
    assert steps(run) == [4]


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step-00000003", run / "checkpoints" / "step-00000012")
    assert steps(run) == [1, 2, 3, 4]
    found = {summary.step: summary.problem for summary in summaries(CheckpointDirectory(run / "checkpoints"))}
    assert found[12] == "manifest.json is that of step 3"


def test_a_damaged_or_lost_checkpoint_that_is_asked_for(run: Path) -> None:
    directory = CheckpointDirectory(run / "checkpoints")
    (directory.path / "step-00000003" / "rng.safetensors").unlink()
    with pytest.raises(UserError, match=r"step-00000003 cannot be used: rng.safetensors is missing"):
        directory.resolve("3")
    shutil.rmtree(directory.path / "step-00000001")
    with pytest.raises(UserError, match="there is no checkpoint 'best'") as lost:
        directory.resolve("best")
    assert "give latest, the path" in str(lost.value.remedy)


def test_a_copy_is_listed_as_the_run_is(run: Path) -> None:
    own = [json.loads(line) for line in checkpoint(run, "list", "--json").out.splitlines()]
    url = f"file://{run}"
    done = run_cli("checkpoint", "list", url, "--json", cwd=run.parent)
    copies = [json.loads(line) for line in done.out.splitlines()]
    for line in (*own, *copies):
        line["folder"] = line["folder"].partition("/checkpoints/")[2]
        line["saved_at"] = round(line["saved_at"] / 60)
    assert copies == own
    assert "best" in run_cli("checkpoint", "list", url, cwd=run.parent).out
    (run / "checkpoints" / "step-00000003" / "manifest.json").unlink()  # as long as its upload has not ended
    for command, code in (("list", 0), ("verify", 1)):
        done = run_cli("checkpoint", command, url, cwd=run.parent)
        assert (done.code, "manifest.json is missing" in done.out) == (code, True), done.out


def test_no_run_at_a_url_or_in_a_project_folder(run: Path, tmp_path: Path) -> None:
    done = run_cli("checkpoint", "list", f"file://{tmp_path}/nothing", cwd=tmp_path)
    assert (done.code, "there is no run in" in done.err) == (2, True)
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert "is not a run directory" in checkpoint(tmp_path, "list", code=2).err
    done = run_cli("checkpoint", "prune", "s3://bucket/runs/demo", "--yes", cwd=tmp_path)
    assert (done.code, "s3://bucket/runs/demo is a folder in an object store" in done.err) == (2, True)


def test_a_folder_that_is_no_run_and_a_run_without_checkpoints(run: Path) -> None:
    for command in ("list", "verify", "prune"):
        assert "is not a run directory" in checkpoint(run.parent, command, code=2).err
    shutil.rmtree(run / "checkpoints")
    assert "has no checkpoints yet" in checkpoint(run, "list").out
    checkpoint(run, "verify", code=2)
    assert checkpoint(run, "prune", "--yes").out == "there is nothing to delete\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, of which each checkpoint was then written anew in parts, and a copy of it as it was."""
    folder = tmp_path_factory.mktemp("parts")
    write_text(folder / "train.txt", 60, seed=1)
    write_text(folder / "valid.txt", 20, seed=2)
    (folder / "config.yaml").write_text(CONFIG)
    done = run_cli("train", "config.yaml", cwd=folder)
    assert done.code == 0, done.err
    shutil.copytree(folder / "runs" / "demo", folder / "runs" / "whole")
    directory = CheckpointDirectory(folder / "runs" / "demo" / "checkpoints")
    for step in directory.steps():
        rewrite_in_parts(directory, step)
    assert {summary.parts for summary in summaries(directory)} == {3}
    return folder


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (("eval", "RUN"), "RUN/eval/validation/scores.json"),
        (("export", "RUN", "--to", "RUN-model"), "RUN-model/model.safetensors"),
    ],
)
def test_commands_read_parts(project: Path, words: tuple[str, ...], written: str) -> None:
    found = []
    for run in ("runs/whole", "runs/demo"):
        done = run_cli(*(word.replace("RUN", run) for word in words), cwd=project)
        assert done.code == 0, done.err
        found.append((project / written.replace("RUN", run)).read_bytes())
    assert found[0] == found[1]


def test_damage_that_is_found_while_weights_are_read_is_one_message(project: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    shutil.copytree(project / "runs" / "demo", run)
    for path in run.glob("checkpoints/*/model-*.safetensors"):
        spoil(path)
    done = run_cli("eval", str(run), cwd=project)
    assert done.code == 2, done.err
    assert "cannot be used: model-0000" in done.err
    assert "Traceback" not in done.err


def test_a_run_that_was_saved_in_parts_goes_on_as_one_of_whole_tensors(project: Path) -> None:
    for run in ("whole", "demo"):
        done = run_cli("train", "config.yaml", "train.steps=9", f"run.name={run}", cwd=project)
        assert done.code == 0, done.err
    lines = [
        [json.loads(line).get("train/loss") for line in (project / "runs" / run / "metrics.jsonl").open()]
        for run in ("whole", "demo")
    ]
    assert lines[0] == lines[1]
    ends = [read_snapshot(project / "runs" / run / "checkpoints" / "step-00000009") for run in ("whole", "demo")]
    for tensors in ("model", "optimizer"):
        first, second = (getattr(end, tensors) for end in ends)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
