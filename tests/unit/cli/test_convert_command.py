"""``drawbar convert``: what it refuses, in one message, writing nothing; and that it executes nothing that it reads."""

import json
import os
import pickle
import shutil
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from conftest import make_project
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.read import read_snapshot
from drawbar.cli import group
from drawbar.errors import UserError
from harness import run_cli, run_script
from messages import check_one_message
from runs import fit_in


class Harmful:
    """A pickle of it makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of four steps, and the folders that were made of its checkpoint."""
    folder = make_project(tmp_path_factory.mktemp("trained"))
    fit_in(folder, "train.steps=4")
    for to in ("dcp", "deepspeed"):
        done = run_cli("convert", "runs/tiny", "--to", to, "--output", to, cwd=folder)
        assert done.code == 0, done.err
        assert done.out == f"{to}: step 4\n"
    done = run_cli("convert", "runs/tiny", "--to", "huggingface", "--output", "model", cwd=folder)
    assert done.code == 0, done.err
    return folder


def files_of(project: Path) -> list[Path]:
    return sorted(path for path in project.rglob("*") if ".cache" not in path.parts)


def refused(project: Path, *arguments: str, says: str) -> None:
    before = files_of(project)
    with chdir(project), pytest.raises(UserError) as found:
        group.main(["convert", *arguments], standalone_mode=False)
    assert says in str(found.value)
    assert found.value.remedy
    assert found.value.exit_code in (1, 2)
    assert files_of(project) == before


MODEL = ("--model", "model", "--output", "new")


def shape(folder: Path, name: str, **fields: object) -> tuple[str, ...]:
    """Options that name the config of the run's model with other fields."""
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps({**config, **fields}))
    return ("--model", name, "--output", "new")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs/tiny", "--output", "x"], "it takes either --to or --from: neither is given"),
        (["runs/tiny", "--to", "dcp", "--from", "dcp", *MODEL], "it takes either --to or --from, not both"),
        (["runs/tiny", "--to", "dcp", *MODEL], "--model does not go with --to"),
        (["dcp", "--from", "dcp", "--checkpoint", "4", *MODEL], "--checkpoint does not go with --from"),
        (["dcp", "--from", "dcp", "--output", "new"], "--from needs --model, which is not given"),
        (["s3://bucket/run", "--to", "dcp", "--output", "x"], "s3://bucket/run is a URL"),
        (["runs/tiny", "--to", "dcp", "--output", "s3://bucket/x"], "s3://bucket/x is a URL"),
        (["runs/tiny", "--to", "deepspeed", "--output", "dcp"], "dcp is not empty"),
        (["runs/tiny", "--to", "dcp", "--output", "config.yaml"], "config.yaml is a file"),
        (["runs/tiny", "--to", "dcp", "--output", "x", "--checkpoint", "9"], "there is no checkpoint '9'"),
        (["runs/other", "--to", "dcp", "--output", "x"], "runs/other"),
        (["none", "--from", "dcp", *MODEL], "there is no folder none"),
        (["runs", "--from", "dcp", *MODEL], "it has no .metadata"),
        (["runs", "--from", "deepspeed", *MODEL], "it has no …_model_states.pt"),
        (["dcp", "--from", "dcp", "--model", "model", "--output", "deepspeed"], "deepspeed is not empty"),
        (["dcp", "--from", "dcp", "--model", "runs", "--output", "new"], "the folder runs has no config.json"),
    ],
)
def test_a_wrong_request_writes_nothing(trained: Path, arguments: list[str], says: str) -> None:
    refused(trained, *arguments, says=says)


@pytest.mark.parametrize("form", ["dcp", "deepspeed"])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 16, "head_dim": 16}, "model.embed_tokens.weight is [300, 32] in {form}, and [300, 16] in"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 1}, "has model.layers.1.input_layernorm.weight, for which the model has no place"),
        ({"architectures": None}, "architectures in other/config.json is None"),
        ({"architectures": ["Trainer"]}, "architectures in other/config.json is ['Trainer']: no class"),
        ({"tie_word_embeddings": True}, "lm_head.weight and model.embed_tokens.weight are one tensor in the model"),
    ],
)
def test_another_model_is_refused(
    trained: Path, tmp_path: Path, form: str, fields: dict[str, object], says: str
) -> None:
    copied(trained, tmp_path, form, "model")
    options = shape(tmp_path, "other", **fields)
    refused(tmp_path, form, "--from", form, *options, says=says.format(form=form))


def test_weights_in_two_places_are_refused(trained: Path, tmp_path: Path) -> None:
    copied(trained, tmp_path, "runs", "model")
    weights = dict(read_snapshot(CheckpointDirectory(tmp_path / "runs" / "tiny" / "checkpoints").resolve("4")).model)
    dcp.save({"model": weights, "ema": weights}, checkpoint_id=tmp_path / "both", no_dist=True)
    refused(tmp_path, "both", "--from", "dcp", *MODEL, says="are in 2 places of both: ema., model.")


def test_what_is_not_taken_is_said(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copied(trained, tmp_path, "dcp", "model")
    done = run_cli("convert", "dcp", "--from", "dcp", *MODEL, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out == (
        "new: a model for task.model; its optimizer state is not taken: training begins with a fresh one\n"
    )
    assert {path.name for path in (tmp_path / "model").iterdir()} - {"README.md"} == {
        path.name for path in (tmp_path / "new").iterdir()
    }
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("new", "model"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    with chdir(tmp_path):
        arguments = ["convert", "dcp", "--from", "dcp", *shape(tmp_path, "bare")]
        group.main([*arguments[:-1], "bare-new"], standalone_mode=False)
    assert "the folder gets no tokenizer, and a run needs task.tokenizer" in caplog.text


def test_a_damaged_checkpoint_is_named(trained: Path, tmp_path: Path) -> None:
    copied(trained, tmp_path, "runs", "dcp", "model")
    file = tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000004" / "optimizer-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)
    arguments = ("convert", "runs/tiny", "--checkpoint", "4", "--to", "dcp", "--output", "x")
    before, done = files_of(tmp_path), run_cli(*arguments, cwd=tmp_path)
    assert done.code == 2
    check_one_message(done.err, file.name)
    assert files_of(tmp_path) == before
    stored = max((tmp_path / "dcp").glob("*.distcp"), key=lambda file: file.stat().st_size)
    os.truncate(stored, stored.stat().st_size // 2)
    refused(tmp_path, "dcp", "--from", "dcp", *MODEL, says="cannot be read")


def test_nothing_that_is_read_is_executed(trained: Path, tmp_path: Path) -> None:
    copied(trained, tmp_path, "model")
    harmful = Harmful(tmp_path / "executed")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(harmful))
    for name in ("zero", "universal"):
        (tmp_path / name).mkdir()
        torch.save({"module": {}, "more": harmful}, tmp_path / name / "mp_rank_00_model_states.pt")
    (tmp_path / "universal" / "zero").mkdir()
    for source, form, says in (
        ("dcp", "dcp", "posix.mkdir"),
        ("zero", "deepspeed", "DeepSpeed cannot read zero: Weights only load failed"),
        ("universal", "deepspeed", "DeepSpeed cannot read universal: Weights only load failed"),
    ):
        refused(tmp_path, source, "--from", form, *MODEL, says=says)
    dcp.save({"model": {"weight": torch.zeros(1)}}, checkpoint_id=tmp_path / "outside", no_dist=True)
    content = (tmp_path / "outside" / ".metadata").read_bytes()
    assert b"__0_0.distcp" in content
    (tmp_path / "outside" / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../../passwd"))
    refused(tmp_path, "outside", "--from", "dcp", *MODEL, says="which is no file of the folder")


def copied(project: Path, folder: Path, *names: str) -> Path:
    """The project's files, and ``names`` of its folders, to damage."""
    for name in ("config.yaml", "train.txt", "valid.txt", *names):
        (shutil.copytree if (project / name).is_dir() else shutil.copy)(project / name, folder / name)
    return folder


def test_a_checkpoint_of_a_run_without_a_moment_is_refused(trained: Path, tmp_path: Path) -> None:
    copied(trained, tmp_path, "runs")
    directory = CheckpointDirectory(tmp_path / "runs" / "tiny" / "checkpoints")
    snapshot = read_snapshot(directory.resolve("4"))
    name = next(name for name in snapshot.optimizer if name.endswith("q_proj.weight/exp_avg_sq"))
    optimizer = {each: snapshot.optimizer[each] for each in snapshot.optimizer if each != name}
    directory.write(replace(snapshot, model=dict(snapshot.model), optimizer=optimizer))
    with pytest.raises(UserError, match=f"it has no {name}"):
        fit_in(tmp_path, "train.steps=5")


def test_a_dcp_file_that_is_missing_is_named(trained: Path, tmp_path: Path) -> None:
    copied(trained, tmp_path, "dcp", "model")
    file = max((tmp_path / "dcp").glob("*.distcp"), key=lambda file: file.stat().st_size)
    file.unlink()
    refused(tmp_path, "dcp", "--from", "dcp", *MODEL, says=file.name)


@pytest.mark.parametrize("to", ["dcp", "deepspeed"])
def test_a_full_disk_is_one_message(trained: Path, tmp_path: Path, to: str) -> None:
    """The files are too large for the limit that the process has."""
    (tmp_path / "limit.py").write_text(
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "from drawbar.cli import run\n"
        "run()\n"
    )
    before = files_of(tmp_path)
    arguments = ("convert", "runs/tiny", "--to", to, "--output", str(tmp_path / "to"))
    done = run_script(tmp_path / "limit.py", *arguments, cwd=trained)
    assert done.code == 1, done.out + done.err
    check_one_message(done.out + done.err, "cannot write", "--output", "File too large")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("settings", [["optim.name=muon"], ["optim.name=sgd"], ["optim.state_dtype=bf16"]])
def test_other_optimizers_are_refused(project: Path, settings: list[str]) -> None:
    fit_in(project, "train.steps=1", "eval.every=null", "optim.warmup=0", *settings)
    for to in ("dcp", "deepspeed"):
        refused(project, "runs/tiny", "--to", to, "--output", "x", says=f"--to {to} writes the state of AdamW")
