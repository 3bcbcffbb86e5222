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
from safetensors.torch import save_file

from conftest import make_project
from drawbar.checkpoint import CheckpointDirectory, read
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


TO_RUN = ("--to-run", "config.yaml", "run.name=new")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs/tiny"], "it takes either --to or --from: neither is given"),
        (["runs/tiny", "--to", "dcp", "--from", "dcp"], "it takes either --to or --from, not both"),
        (["runs/tiny", "--to", "dcp"], "--to needs --output, which is not given"),
        (["runs/tiny", "--to", "dcp", "--output", "x", "train.steps=5"], "KEY=VALUE does not go with --to"),
        (["dcp", "--from", "dcp", "--output", "x"], "--output does not go with --from"),
        (["dcp", "--from", "dcp", "run.name=new"], "--from needs --to-run, which is not given"),
        (["s3://bucket/run", "--to", "dcp", "--output", "x"], "s3://bucket/run is a URL"),
        (["runs/tiny", "--to", "dcp", "--output", "s3://bucket/x"], "s3://bucket/x is a URL"),
        (["dcp", "--from", "dcp", *TO_RUN, "train.steps=3"], "train.steps=3 asks for 3 steps, but 4 are made already"),
        (["runs/tiny", "--to", "parts", "--output", "dcp"], "dcp is not empty"),
        (["runs/tiny", "--to", "parts", "--output", "config.yaml"], "config.yaml is a file"),
        (["runs/tiny", "--to", "dcp", "--output", "x", "--checkpoint", "9"], "there is no checkpoint '9'"),
        (["runs/other", "--to", "dcp", "--output", "x"], "runs/other"),
        (["none", "--from", "dcp", *TO_RUN], "there is no folder none"),
        (["runs", "--from", "dcp", *TO_RUN], "it has no .metadata"),
        (["runs", "--from", "trainer", *TO_RUN], "it has no trainer_state.json"),
        (["runs", "--from", "deepspeed", *TO_RUN], "it has no …_model_states.pt"),
        (["dcp", "--from", "dcp", "--to-run", "config.yaml"], "is not empty"),
        (["dcp", "--from", "dcp", *TO_RUN, "optim.name=sgd"], "only the state of AdamW"),
        (["dcp", "--from", "dcp", *TO_RUN, "task.from_scratch.hidden_size=16"], "should be [300, 16]"),
        (["dcp", "--from", "dcp", *TO_RUN, "task.from_scratch.num_hidden_layers=3"], "model.layers.2."),
        (["dcp", "--from", "dcp", *TO_RUN, "task.from_scratch.num_hidden_layers=1"], "nothing trains model.layers.1."),
        (["deepspeed", "--from", "deepspeed", *TO_RUN, "task.from_scratch.num_hidden_layers=3"], "is missing"),
        (["deepspeed", "--from", "deepspeed", *TO_RUN, "task.from_scratch.hidden_size=16"], "numbers in the folder"),
    ],
)
def test_a_wrong_request_writes_nothing(trained: Path, arguments: list[str], says: str) -> None:
    refused(trained, *arguments, says=says)


def test_a_damaged_checkpoint_is_named(trained: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "runs", "train.txt", "valid.txt", "dcp"):
        copy = shutil.copytree if (trained / name).is_dir() else shutil.copy
        copy(trained / name, tmp_path / name)
    assert run_cli("convert", "runs/tiny", "--to", "parts", "--output", "in-parts", cwd=tmp_path).code == 0
    for file in (
        tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000004" / "optimizer.safetensors",
        tmp_path / "in-parts" / "checkpoints" / "step-00000004" / "optimizer-00000.safetensors",
    ):
        content = bytearray(file.read_bytes())
        content[-9] ^= 4
        file.write_bytes(content)
        run = file.parents[2].relative_to(tmp_path)
        arguments = ("convert", str(run), "--checkpoint", "4", "--to", "dcp", "--output", "x")
        before, done = files_of(tmp_path), run_cli(*arguments, cwd=tmp_path)
        assert done.code == 2
        check_one_message(done.err, file.name)
        assert files_of(tmp_path) == before
    stored = max((tmp_path / "dcp").glob("*.distcp"), key=lambda file: file.stat().st_size)
    os.truncate(stored, stored.stat().st_size // 2)
    refused(tmp_path, "dcp", "--from", "dcp", *TO_RUN, says="cannot be read")


def test_nothing_that_is_read_is_executed(trained: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "train.txt", "valid.txt"):
        shutil.copy(trained / name, tmp_path / name)
    harmful = Harmful(tmp_path / "executed")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(harmful))
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    save_file({"weight": torch.zeros(1)}, tmp_path / "trainer" / "model.safetensors")
    torch.save({"state": harmful, "param_groups": []}, tmp_path / "trainer" / "optimizer.pt")
    (tmp_path / "deepspeed").mkdir()
    torch.save({"global_steps": 3, "more": harmful}, tmp_path / "deepspeed" / "mp_rank_00_model_states.pt")
    for form, says in (("dcp", "posix.mkdir"), ("trainer", "optimizer.pt"), ("deepspeed", "cannot read")):
        refused(tmp_path, form, "--from", form, *TO_RUN, says=says)
    dcp.save({"model": {"weight": torch.zeros(1)}}, checkpoint_id=tmp_path / "outside", no_dist=True)
    content = (tmp_path / "outside" / ".metadata").read_bytes()
    assert b"__0_0.distcp" in content
    (tmp_path / "outside" / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../../passwd"))
    refused(tmp_path, "outside", "--from", "dcp", *TO_RUN, says="which is no file of the folder")


def copied(project: Path, folder: Path, *names: str) -> Path:
    """The project's files, and ``names`` of its folders, to damage."""
    for name in ("config.yaml", "train.txt", "valid.txt", *names):
        (shutil.copytree if (project / name).is_dir() else shutil.copy)(project / name, folder / name)
    return folder


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq"])
def test_a_moment_that_is_missing_is_named(trained: Path, tmp_path: Path, missing: str) -> None:
    copied(trained, tmp_path, "deepspeed", "runs")
    file = next((tmp_path / "deepspeed").rglob(f"*q_proj*/{missing}.pt"))
    file.unlink()
    says = f"{file.relative_to(tmp_path)} is missing"
    refused(tmp_path, "deepspeed", "--from", "deepspeed", *TO_RUN, says=says)


def test_a_checkpoint_of_a_run_without_a_moment_is_refused(trained: Path, tmp_path: Path) -> None:
    copied(trained, tmp_path, "runs")
    directory = CheckpointDirectory(tmp_path / "runs" / "tiny" / "checkpoints")
    snapshot = read(directory.resolve("4"))
    name = next(name for name in snapshot.optimizer if name.endswith("q_proj.weight/exp_avg_sq"))
    optimizer = {each: snapshot.optimizer[each] for each in snapshot.optimizer if each != name}
    directory.write(replace(snapshot, model=dict(snapshot.model), optimizer=optimizer))
    with pytest.raises(UserError, match=f"it has no {name}"):
        fit_in(tmp_path, "train.steps=5")


def test_a_dcp_file_that_is_missing_is_named(trained: Path, tmp_path: Path) -> None:
    copied(trained, tmp_path, "dcp")
    file = max((tmp_path / "dcp").glob("*.distcp"), key=lambda file: file.stat().st_size)
    file.unlink()
    refused(tmp_path, "dcp", "--from", "dcp", *TO_RUN, says=file.name)


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


def test_a_run_gets_a_name_that_commands_open(trained: Path) -> None:
    for name in ("my run!", "-x", ".."):
        refused(trained, "runs/tiny", "--to", "parts", "--output", f"new/{name}", says="cannot be the name of a run")
    assert run_cli("convert", "runs/tiny", "--to", "dcp", "--output", "any name!", cwd=trained).code == 0  # no run


def test_moments_that_adamw_does_not_have_are_refused(trained: Path, tmp_path: Path) -> None:
    """Those of AMSGrad would be dropped, and the run would go on as another optimizer."""
    copied(trained, tmp_path, "runs")
    snapshot = read(CheckpointDirectory(tmp_path / "runs" / "tiny" / "checkpoints").resolve("4"))
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name in snapshot.optimizer:
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = snapshot.optimizer[name]
    for values in state.values():
        values["max_exp_avg_sq"] = values["exp_avg_sq"] * 2
    tree = {"model": dict(snapshot.model), "optimizer": {"state": state}}
    dcp.save(tree, checkpoint_id=tmp_path / "amsgrad", no_dist=True)
    refused(tmp_path, "amsgrad", "--from", "dcp", *TO_RUN, says="it keeps max_exp_avg_sq of ")


def write_trainer_folder(folder: Path, **config: object) -> None:
    """The beginning of a Trainer's checkpoint; ``optimizer.pt`` is not there."""
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    (folder / "config.json").write_text(json.dumps(config))


def test_adapters_are_not_taken_over(trained: Path, tmp_path: Path) -> None:
    copied(trained, tmp_path)
    write_trainer_folder(tmp_path / "lora")
    (tmp_path / "lora" / "config.json").unlink()
    save_file({"weight": torch.zeros(1)}, tmp_path / "lora" / "adapter_model.safetensors")
    refused(tmp_path, "lora", "--from", "trainer", *TO_RUN, says="has adapters only (adapter_model.safetensors)")


@pytest.mark.parametrize("file", ["trainer_state.json", "optimizer.pt", "config.json"])
def test_a_file_that_git_lfs_did_not_fetch_is_named(file: str, trained: Path, tmp_path: Path) -> None:
    copied(trained, tmp_path)
    write_trainer_folder(tmp_path / "lfs")
    (tmp_path / "lfs" / "config.json").unlink()
    (tmp_path / "lfs" / file).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 9\n"
    )
    refused(tmp_path, "lfs", "--from", "trainer", *TO_RUN, says=f"{file}: it is a Git LFS pointer")


def test_labels_in_another_order_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = {"train": "byte_bpe", "vocab_size": 261}
    task = {"type": "sequence_classification", "model": "bert", "from_scratch": sizes, "tokenizer": tokenizer}
    rows = [{"text": f"road {number}", "label": ("positive", "negative")[number % 2]} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"task": task, "data": {"train": "rows.jsonl", "sequence_length": 16}, "train": {"steps": 9}}
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    names = {"id2label": {"0": "positive", "1": "negative"}, "label2id": {"positive": 0, "negative": 1}}
    shape = {"model_type": "bert", "vocab_size": 261, **sizes}
    write_trainer_folder(tmp_path / "trained", **shape, **names)
    write_trainer_folder(tmp_path / "unnamed", **shape)
    write_trainer_folder(tmp_path / "other", **shape, id2label={"0": "good", "1": "bad"})
    refused(tmp_path, "trained", "--from", "trainer", *TO_RUN, says='task.labels=["positive", "negative"]')
    for source, *settings in (("trained", "task.labels=[positive, negative]"), ("unnamed",), ("other",)):
        refused(tmp_path, source, "--from", "trainer", *TO_RUN, *settings, says="has no optimizer.pt")
    told = [record.getMessage() for record in caplog.records if "now stand for" in record.getMessage()]
    assert told == [
        "the outputs of the Trainer's model were good, bad, in this order, and now stand for negative, positive"
    ]
