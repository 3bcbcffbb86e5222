"""Acceptance: a bad input gets one message that says what, where and what to do; no traceback, no half-written run."""

import ast
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import drawbar
from conftest import make_project
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from exhaustive import some
from harness import Finished, run_cli, run_ranks
from messages import check_one_message
from runs import weights

NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
TRAIN = ("train", "config.yaml")
CHECKPOINT = "runs/tiny/checkpoints/step-00000012"
PRETRAINED = ("task.from_scratch=null", "task.model=model")

Make = Callable[[Path], object]


def nothing(project: Path) -> None:
    """The project as it is."""


@dataclass(frozen=True)
class Case:
    """A bad input: how to make it, the command, and what its one message must say."""

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    make: Make = nothing
    code: int = 2
    env: dict[str, str] = field(default_factory=dict)
    encodes: bool = False
    """What is wrong shows in the encoded data, which stay in the cache."""


def file(name: str, content: str | bytes) -> Make:
    """Makes the file (or replaces it) in the project."""
    return lambda project: (project / name).write_bytes(content.encode() if isinstance(content, str) else content)


def folder(name: str, **files: str | bytes) -> Make:
    """Makes a folder with files, named ``config_json`` for ``config.json``."""

    def make(project: Path) -> None:
        (project / name).mkdir(parents=True)
        for key, content in files.items():
            file(f"{name}/{key.replace('_', '.', 1)}", content)(project)

    return make


def rank_of_two(rank: int, port: int | str) -> dict[str, str]:
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in place.items()}


def model_with_other_weights(project: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300)).save_pretrained(project / "model")
    saved = project / "model" / "config.json"
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "intermediate_size": 64}))


CONFIG = json.dumps({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4})

PICKY = """
import drawbar

class Picky(drawbar.CausalLM):
    def encode(self, record, train):
        return super().encode(record, train) if train else None
"""

SCORED = """
import drawbar

class Mine(drawbar.CausalLM):
    def score(self, records):
        return {"accuracy": 1.0}
"""

COMMAND_LINE = [
    Case("unknown command", ("trian", "config.yaml"), ("No such command 'trian'", "Did you mean 'train'?")),
    Case("unknown option", (*TRAIN, "--resum", "never"), ("No such option '--resum'", "'--resume'", "--help")),
    Case(
        "no configuration",
        ("train",),
        ("data.train", "nothing to train on", "train.steps", "`drawbar train config.yaml`", "set data.train"),
    ),
    Case("no configuration to plan", ("plan",), ("nothing to train on", "`drawbar plan config.yaml`")),
    Case("override without =", (*TRAIN, "optim.lr"), ("command line: optim.lr", "KEY=VALUE")),
    Case("eval of no run", ("eval", "runs/nope"), ("runs/nope is not a run directory", "config.yaml")),
    Case("generate of no run", ("generate", "data"), ("data is not a run directory", "config.yaml")),
]

CONFIGURATION = [
    Case("unknown key", (*TRAIN, "optim.learning_rate=1"), ("optim.learning_rate", "unknown key", "lr")),
    Case("unknown section", (*TRAIN, "optm.lr=1"), ("optm", "unknown key", "did you mean optim?")),
    Case("unknown key in the file", TRAIN, ("config.yaml:2", "train.step", "train.steps"),
         file("config.yaml", "data: {train: train.txt}\ntrain: {step: 5}\n")),
    Case("wrong type", (*TRAIN, "train.steps=ten"), ("train.steps=ten", "whole number", "'ten'")),
    Case("unknown word", (*TRAIN, "optim.name=adam"), ("optim.name", "sgd", "did you mean adamw?")),
    Case("out of range", (*TRAIN, "optim.lr=-1"), ("optim.lr", "number >= 0", "-1")),
    Case("unset variable", (*TRAIN, "data.train=${NOT_SET_HERE}/a"), ("data.train", "NOT_SET_HERE is not set")),
    Case("unknown task", (*TRAIN, "task.type=causal_ml"), ("task.type", "'causal_ml'", "did you mean causal_lm?")),
    Case("task that is not there", (*TRAIN, "task.type=mine:Task"), ("task.type", "'mine:Task' cannot be imported")),
    Case("task that is none", (*TRAIN, "task.type=mine:Thing"), ("mine:Thing", "not a task"),
         file("mine.py", "class Thing: ...")),
    Case("duplicate key", TRAIN, ("config.yaml:2", 'duplicate key "train"', "keep one"),
         file("config.yaml", "train: {steps: 1}\ntrain: {steps: 2}\n")),
    Case("no YAML", TRAIN, ("config.yaml:2", "not valid YAML"), file("config.yaml", "train: {steps: 1\n")),
    Case("missing file", ("train", "confg.yaml"), ("no such file", "confg.yaml", "did you mean config.yaml?")),
    Case("empty file", TRAIN, ("the file is empty", "config.yaml", "data: {train:"), file("config.yaml", "")),
    Case("not UTF-8", TRAIN, ("config.yaml:2", "not UTF-8", "save it again"),
         file("config.yaml", b"train:\n  steps: 1 # caf\xe9\n")),
    Case("a folder", ("train", "settings"), ("settings", "a folder, not a YAML file"), folder("settings")),
]  # fmt: skip

COMBINATIONS = [
    Case("steps and epochs", (*TRAIN, "train.epochs=1", "train.steps=12"),
         ("train.steps=12 (command line)", "train.epochs=1.0 (command line)", "both set how long", "keep one")),
    Case("neither steps nor epochs", (*TRAIN, "train.steps=null"), ("it is unknown how long to train", "train.epochs")),
    Case("micro-batch that does not divide", (*TRAIN, "train.micro_batch=3"),
         ("train.micro_batch=3", "train.global_batch=8", "divides global_batch")),
    Case("global batch that cannot be split", (*TRAIN, "train.global_batch=9", "train.micro_batch=3", "launch.nproc=2"),
         ("train.global_batch=9", "2 processes", "8 or 10")),
    Case("share that micro-batch does not divide", (*TRAIN, "train.micro_batch=8", "launch.nproc=2"),
         ("train.micro_batch=8", "4 rows", "1, 2 or 4")),
    Case("single with two processes", (*TRAIN, "parallel.strategy=single", "launch.nproc=2"),
         ("parallel.strategy=single", "launch.nproc=2", "one process")),
    Case("strategies that do not combine",
         (*TRAIN, "parallel.strategy=zero1", "parallel.tensor=2", "launch.nproc=2"),
         ("parallel.strategy=zero1", "parallel.tensor=2", "fsdp")),
    Case("too few ranks for a model", (*TRAIN, "parallel.tensor=2"),
         ("tensor=2", "start 2 processes", "launch.nproc=2")),
    Case("fp8", (*TRAIN, "precision=fp8"), ("precision=fp8", "expected auto | fp32 | bf16 | fp16")),
    Case("wandb", (*TRAIN, "tracking.wandb={project: x}"), ("tracking.wandb", "did you mean tracking.trackers?")),
    Case("evaluation without data", (*TRAIN, "data.validation=null"),
         ("eval.every=5 (config.yaml:12)", "no validation data", "set data.validation")),
    Case("warm-up that never ends", (*TRAIN, "optim.warmup=12"), ("optim.warmup=12", "train.steps=12", "fraction")),
    Case("metric that there is not", (*TRAIN, "eval.metric=accuracy"),
         ("'accuracy'", "bits_per_byte, loss, perplexity", "eval.metric")),
]  # fmt: skip

DATA = [
    Case("not set", (*TRAIN, "data.train=null"),
         ("data.train=null", "nothing to train on", "set data.train", "data.train=generated")),
    Case("missing file", (*TRAIN, "data.train=trian.txt"), ("trian.txt", "data.train", "did you mean train.txt?")),
    Case("missing folder", (*TRAIN, "data.train=a/b.txt"), ("a/b.txt", "folder a does not exist", "data.train")),
    Case("empty file", TRAIN, ("train.txt", "it is empty", "put data"), file("train.txt", "")),
    Case("blank file", TRAIN, ("train.txt", "only blank lines", "put data"), file("train.txt", "\n \n")),
    Case("not UTF-8", TRAIN, ("train.txt:2", "0xe9", "iconv"), file("train.txt", b"tea\ncaf\xe9\n")),
    Case("broken JSON", (*TRAIN, "data.train=a.jsonl"), ("a.jsonl:2", "not valid JSON", "correct the line"),
         file("a.jsonl", '{"text": "a"}\n{"text": \n')),
    Case("no JSON object", (*TRAIN, "data.train=a.jsonl"), ("a.jsonl:1", "not an object", '{"text"'),
         file("a.jsonl", '["a"]\n')),
    Case("another column", (*TRAIN, "data.train=a.jsonl"), ("no 'text'", "has 'body'", "task.text_column", "a.jsonl:1"),
         file("a.jsonl", '{"body": "a"}\n')),
    Case("unknown kind", (*TRAIN, "data.train=a.xlsx"), ("a.xlsx", "unknown format"), file("a.xlsx", "a,b\n")),
    Case("pattern without files", (*TRAIN, "data.train=t*.text"), ("t*.text", "no file matches", "data.train")),
    Case("a folder", (*TRAIN, "data.train=texts"), ("texts is a folder", "texts/*.txt"), folder("texts", a_txt="a")),
    Case("empty validation", TRAIN, ("valid.txt", "it is empty", "put data"), file("valid.txt", "")),
    Case("prompts that fill all",
         (*TRAIN, "data.train=a.jsonl", "task.prompt_column=a", "task.completion_column=b", "data.sequence_length=4",
          "data.validation=null", "eval.every=null"),
         ("no samples", "leave no room for an answer", "a.jsonl:1", "set data.sequence_length to "),
         file("a.jsonl", '{"a": "a prompt that is long", "b": "an answer"}\n')),
    Case("texts without prompts", (*TRAIN, "task.prompt_column=prompt", "task.completion_column=completion"),
         ("no 'prompt'", "a text without a prompt", "task.completion_column to null", "train.txt:1")),
    Case("validation without samples", (*TRAIN, "task.type=picky:Picky"), ("no samples", "17 records", "valid.txt:1"),
         file("picky.py", PICKY)),
    Case("prompts", ("generate", ".", "--input", "nope.txt"), ("nope.txt", "does not exist")),
]  # fmt: skip

MODELS = [
    Case("unknown type", (*TRAIN, "task.model=lama"), ("'lama'", "task.model", "did you mean llama?")),
    Case("no language model", (*TRAIN, "task.model=t5"), ("t5 is no causal language model", "task.model", "llama")),
    Case("hub out of reach", (*TRAIN, "task.from_scratch=null", "task.model=nobody/nothing"),
         ("'nobody/nothing'", "task.model", "give a folder")),
    Case("tokenizer out of reach", (*TRAIN, "task.tokenizer=nobody/nothing"),
         ("'nobody/nothing'", "cannot be reached", "hf download")),
    Case("missing folder", (*TRAIN, "task.from_scratch=null", "task.model=./model"), ("./model", "check the path")),
    Case("empty folder", (*TRAIN, *PRETRAINED), ("folder model is empty", "task.model"), folder("model")),
    Case("broken config.json", (*TRAIN, *PRETRAINED), ("model/config.json is not JSON, line 1", "task.model"),
         folder("model", config_json="{")),
    Case("no weights", (*TRAIN, *PRETRAINED), ("'model'", "model.safetensors", "task.model"),
         folder("model", config_json=CONFIG)),
    Case("broken weights", (*TRAIN, *PRETRAINED), ("'model'", "header", "task.model"),
         folder("model", config_json=CONFIG, model_safetensors=b"not a tensor in sight")),
    Case("weights of another size", (*TRAIN, *PRETRAINED), ("mlp", "[32, 48]", "[32, 64]", "config.json"),
         model_with_other_weights),
    Case("unknown field", (*TRAIN, "task.from_scratch.hiden_size=32"),
         ("llama has no field 'hiden_size'", "task.from_scratch.hiden_size", "did you mean 'hidden_size'?")),
    Case("field of another type", (*TRAIN, "task.from_scratch.hidden_size=big"),
         ("hidden_size", "'big'", "task.from_scratch")),
    Case("unknown function", (*TRAIN, "task.from_scratch.hidden_act=relux"), ("'relux'", "task.from_scratch")),
    Case("no layers", (*TRAIN, "task.from_scratch.num_hidden_layers=-1"), ("num_hidden_layers", "-1")),
    Case("heads that do not divide", (*TRAIN, "task.from_scratch.num_attention_heads=5"),
         ("hidden size (32)", "heads (5)", "task.from_scratch")),
    Case("groups that do not divide", (*TRAIN, "task.from_scratch.num_key_value_heads=3"),
         ("num_attention_heads (4)", "num_key_value_heads (3)", "task.from_scratch")),
    Case("fewer embeddings than tokens", (*TRAIN, "task.from_scratch.vocab_size=100"),
         ("300 tokens", "embeddings for 100", "task.tokenizer", "task.resize_embeddings=true")),
    Case("fewer positions than tokens", (*TRAIN, "data.sequence_length=128"),
         ("data.sequence_length is 128", "64 positions", "data.sequence_length=64")),
    Case("no tokenizer", (*TRAIN, "task.tokenizer=null"), ("needs a tokenizer", "task.tokenizer", "byte_bpe")),
    Case("tokenizer without files", (*TRAIN, "task.tokenizer=tokens"), ("the folder tokens", "tokenizer.json"),
         folder("tokens")),
]  # fmt: skip

PLACES = [
    Case("below a file", (*TRAIN, "run.dir=train.txt/runs"), ("train.txt is a file", "run.dir")),
    Case("not writable", (*TRAIN, "run.dir=/proc/runs"), ("/proc/runs", "/proc is not writable", "run.dir")),
    Case("name of a file", TRAIN, ("runs/tiny is a file", "run.name"), folder("runs", tiny="mine")),
    Case("files of others", TRAIN, ("runs/tiny contains files", "run.name"), folder("runs/tiny", thesis_txt="mine")),
    Case("no CUDA", (*TRAIN, "device=cuda"), ("device is cuda", "device=cpu"), env={"CUDA_VISIBLE_DEVICES": ""}),
    Case("checkpoint that there is not", (*TRAIN, "--resume", "nowhere"), ("no checkpoint 'nowhere'", "the path of")),
    Case("folder that is no checkpoint", (*TRAIN, "--resume", "."), ("manifest.json is missing", "another one")),
    Case("nothing to fork", (*TRAIN, "--fork", "other"), ("nothing to fork", "runs/tiny", "--fork")),
    Case("name that no run can have", (*TRAIN, "--fork", "../other"), ("'../other'", "--fork", "letters")),
    Case("one of several without the others", TRAIN, ("LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "torchrun"),
         env={"RANK": "0", "WORLD_SIZE": "2"}),
    Case("number of processes that is none", TRAIN, ("whole numbers", "'two'", "torchrun"),
         env={**rank_of_two(0, 1), "WORLD_SIZE": "two"}),
    Case("rank beyond the last", TRAIN, ("RANK=2", "WORLD_SIZE=2", "from 0"), env=rank_of_two(2, 1)),
    Case("port that is none", TRAIN, ("could not meet", "MASTER_PORT=http"), code=1, env=rank_of_two(0, "http")),
]  # fmt: skip

if not torch.backends.mps.is_available():
    PLACES.append(Case("no MPS", (*TRAIN, "device=mps"), ("device is mps", "device=cpu")))

OF_A_RUN = [
    Case("another configuration", (*TRAIN, "optim.lr=0.5"), ("optim.lr", "0.01", "0.5", "runs/tiny", "--fork")),
    Case("resume never", (*TRAIN, "--resume", "never"), ("tiny exists already", "runs/tiny", "run.name")),
    Case("no such checkpoint", (*TRAIN, "--resume", "nowhere"), ("'nowhere'", "8, 10, 12")),
    Case("an older checkpoint", (*TRAIN, "--resume", "8"), ("not the newest", "--resume", "--fork")),
    Case("other data", TRAIN, ("data changed", "data.train", "--fork"), file("train.txt", "another\ntext\n" * 20),
         encodes=True),
    Case("damaged config.yaml", TRAIN, ("own config.yaml is damaged", "runs/tiny/config.yaml", "from a copy"),
         file("runs/tiny/config.yaml", "run: [")),
    Case("fork into files of others", (*TRAIN, "--fork", "other"), ("runs/other contains files", "run.name"),
         folder("runs/other", thesis_txt="mine")),
    Case("weights of another model",
         (*TRAIN, "run.name=big", "task.from_scratch.hidden_size=64", "--resume", CHECKPOINT),
         ("does not fit this model", "embed_tokens", "[300, 32]", "[300, 64]", "18 more", "settings that it was")),
    Case("state of another optimizer",
         (*TRAIN, "run.name=sgd", "optim.name=sgd", "--resume", CHECKPOINT),
         ("adamw, not of sgd", "optim.name", "--fork")),
    Case("eval of no checkpoint", ("eval", "runs/tiny", "--checkpoint", "999"), ("'999'", "8, 10, 12")),
    Case("eval of no checkpoint on new data",
         ("eval", "runs/tiny", "--checkpoint", "999", "data.validation=train.txt"), ("'999'", "8, 10, 12")),
    Case("eval without data", ("eval", "runs/tiny", "--split", "test"), ("no test data", "set data.test")),
    Case("eval of a run spelled wrong", ("eval", "runs/tinny"), ("runs/tinny", "runs/tiny?")),
    Case("generate from no checkpoint", ("generate", "runs/tiny", "--checkpoint", "999"), ("'999'", "8, 10, 12")),
]  # fmt: skip

FRESH = {
    "command line": COMMAND_LINE,
    "configuration": CONFIGURATION,
    "combination": COMBINATIONS,
    "data": DATA,
    "model": MODELS,
    "place": PLACES,
}


@pytest.mark.parametrize(
    "case",
    some([pytest.param(case, id=f"{group}: {case.name}") for group, cases in FRESH.items() for case in cases], 40),
)
def test_nothing_is_begun(case: Case, project: Path) -> None:
    case.make(project)
    check_refused(case, project)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of 12 steps."""
    project = make_project(tmp_path_factory.mktemp("finished"))
    done = run_cli(*TRAIN, cwd=project)
    assert done.code == 0, done.err
    return project


@pytest.mark.parametrize("case", some([pytest.param(case, id=case.name) for case in OF_A_RUN], 5))
def test_a_run_stays_as_it_is(case: Case, finished: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(finished, project)
    case.make(project)
    check_refused(case, project)


@pytest.mark.exhaustive
def test_a_run_that_another_process_trains(finished: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(finished, project)
    with (project / "runs" / "tiny" / ".lock").open("w") as lock:
        lock.write("process 7 on moon")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        says = ("being trained now, by process 7 on moon", "runs/tiny", "stop it")
        check_refused(Case("locked", TRAIN, says), project)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [
        Case("on every rank", (*TRAIN, "run.name=new", "data.train=trian.txt"), ("trian.txt", "did you mean")),
        Case("on rank 0 alone", (*TRAIN, "optim.lr=0.5"), ("optim.lr", "runs/tiny", "--fork")),
    ],
    ids=lambda case: case.name,
)
def test_two_processes_say_it_once(case: Case, finished: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(finished, project)
    arguments, env = (*case.arguments, "launch.nproc=2"), leaves_a_sign(tmp_path)
    check_refused(Case(case.name, arguments, case.says, env=env), project)
    assert (tmp_path / "started").exists()


def test_a_batch_that_cannot_be_split_starts_no_process(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    arguments = (*TRAIN, "launch.nproc=2", "train.global_batch=9", "train.micro_batch=3")
    check_refused(Case("batch", arguments, ("train.global_batch=9",), env=leaves_a_sign(elsewhere)), project)
    assert not (elsewhere / "started").exists()


def leaves_a_sign(folder: Path) -> dict[str, str]:
    """An environment in which every new Python makes the file ``started``."""
    (folder / "sitecustomize.py").write_text(f"open({str(folder / 'started')!r}, 'w')")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.exhaustive
def test_a_metric_that_a_task_of_ones_own_does_not_have(project: Path) -> None:
    """What ``score`` returns is found out on a few samples, before the run begins."""
    (project / "mine.py").write_text(SCORED)
    done = run_cli(*TRAIN, "task.type=mine:Mine", "eval.metric=acuracy", cwd=project, env=NO_NETWORK)
    check_message(done, 2, ("'acuracy'", "accuracy, bits_per_byte, loss, perplexity", "eval.metric"))
    assert not (project / "runs" / "tiny").exists()
    done = run_cli(*TRAIN, "task.type=mine:Mine", "eval.metric=accuracy", cwd=project, env=NO_NETWORK)
    assert done.code == 0, done.err


def test_a_run_that_diverges_keeps_its_checkpoints(project: Path) -> None:
    done = run_cli(*TRAIN, "optim.lr=1e6", "optim.warmup=0", "checkpoint.every=1", cwd=project, env=NO_NETWORK)
    check_message(done, 1, ("diverged", "is nan", "optim.lr", "--fork"))
    lost = re.search(r"of step (\d) is nan", done.err)  # which one depends on the kernels of the processor
    assert lost is not None
    before = range(1, int(lost[1]))
    saved = sorted(path.name for path in (project / "runs" / "tiny" / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in before]
    for step in before:
        assert all(tensor.isfinite().all() for tensor in weights(project / "runs" / "tiny", step).values())


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that a program listens on which is no rank of ours."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.exhaustive
def test_a_port_that_is_taken(taken_port: int, project: Path) -> None:
    says = ("rank 0 could not meet", "address already in use", str(taken_port), "no other program uses that port")
    arguments = (*TRAIN, "launch.timeout=10")
    check_refused(Case("port", arguments, says, code=1, env=rank_of_two(0, taken_port)), project)


def join() -> None:
    Distributed(RankInfo.from_environment(), torch.device("cpu"), timeout=1).__enter__()


@pytest.mark.exhaustive
def test_a_port_where_a_stranger_listens(taken_port: int) -> None:
    with pytest.raises(AssertionError, match=r"error: rank 1 could not meet(.|\n)*MASTER_PORT(.|\n)*fix:"):
        run_ranks(join, 1, env=rank_of_two(1, taken_port), timeout=60)


def test_every_user_error_has_a_remedy() -> None:
    calls = [
        (f"{path}:{node.lineno}", [keyword.arg for keyword in node.keywords])
        for path in Path(drawbar.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError"
    ]
    assert len(calls) > 50
    assert [place for place, keywords in calls if "remedy" not in keywords] == []


def check_refused(case: Case, project: Path) -> None:
    """One message, and every file and folder as it was, but for logs and the lock of a run that is there."""
    left_out = {"logs", ".lock", "__pycache__", *([".cache"] if case.encodes else [])}
    before = snapshot(project, left_out)
    done = run_cli(*case.arguments, cwd=project, env={**NO_NETWORK, **case.env}, timeout=60)
    check_message(done, case.code, case.says)
    assert snapshot(project, left_out) == before
    assert all((lock.parent / "config.yaml").exists() for lock in project.rglob(".lock"))


def check_message(done: Finished, code: int, says: tuple[str, ...]) -> None:
    assert done.code == code, done.out + done.err
    check_one_message(done.out + done.err, *says)


def snapshot(project: Path, left_out: set[str]) -> dict[str, bytes | None]:
    """The content of every file, and None for every folder."""
    found = {path.relative_to(project): path for path in project.rglob("*")}
    return {
        str(name): path.read_bytes() if path.is_file() else None
        for name, path in found.items()
        if not left_out & set(name.parts)
    }
