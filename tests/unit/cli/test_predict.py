"""``drawbar predict`` and ``drawbar generate --input``: records in, the same with answers out."""

import json
import shutil
from contextlib import chdir
from datetime import date
from pathlib import Path

import pyarrow.parquet
import pytest

from drawbar.cli.arguments import load_run
from drawbar.commands.score_run import predict_from_run
from exhaustive import some
from harness import Finished, run_cli, run_ranks
from messages import check_one_message

BERT = "{hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
T5 = "{d_model: 32, d_kv: 8, d_ff: 32, num_layers: 1, num_heads: 2}"
LLAMA = "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 4}"
TOKENIZER = "tokenizer: {train: byte_bpe, vocab_size: 260}"
SHORT = "generation: {max_new_tokens: 4}"
CONFIG = """
task: {TASK}
data: {{train: train.tsv, columns: [text, label], sequence_length: 64, batching: grouped}}
train: {{global_batch: 8, steps: 12}}
precision: fp32
device: cpu
tracking: {{tensorboard: false}}
"""
TASKS = {
    "classes": f"{{type: sequence_classification, model: bert, from_scratch: {BERT}, {TOKENIZER}}}",
    "translation": f"{{type: seq2seq, model: t5, from_scratch: {T5}, {TOKENIZER}, source_column: text, "
    f"target_column: label, metrics: [exact_match], {SHORT}}}",
    "instructions": f"{{model: llama, from_scratch: {LLAMA}, {TOKENIZER}, prompt_column: text, "
    f"completion_column: label, metrics: [exact_match], {SHORT}}}",
    "text": f"{{model: llama, from_scratch: {LLAMA}, {TOKENIZER}}}",
    "own": "{type: 'mine:Ending'}",
}
OWN = """
import numpy as np, torch
import drawbar

class Ending(drawbar.Task):
    def encode(self, record, train):
        if record["text"] == "nothing":
            return None
        sample = {"x": np.eye(2, dtype=np.float32)[int(record["text"].endswith("good"))]}
        if self.has_labels:
            sample["labels"] = int(record["label"] == "good")
        return [sample] * (2 if record["text"].startswith("twice") else 1)

    def build_model(self):
        return torch.nn.Linear(2, 2)

    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum")

    def predict(self, model, batch):
        return ["bad good".split()[i] for i in self.forward(model, batch).argmax(-1).tolist()]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of every task."""
    project = tmp_path_factory.mktemp("predict")
    (project / "mine.py").write_text(OWN)
    rows = [("load " * (1 + i % 7) + word, word) for i in range(40) for word in ("good", "bad")]
    (project / "train.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    for name, task in TASKS.items():
        config = project / f"{name}.yaml"
        config.write_text(f"run: {{name: {name}}}" + CONFIG.format(TASK=task))
        done = run_cli("train", config.name, f"optim.lr={0.5 if name == 'own' else 0.01}", cwd=project)
        assert done.code == 0, done.out + done.err
    return project


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy: what one test writes, no other sees."""
    return Path(shutil.copytree(trained, tmp_path / "project"))


def predict(project: Path, run: str, source: str, *arguments: str, code: int = 0) -> Finished:
    files = ("--input", source, "--output", "out.jsonl")
    done = run_cli("predict", f"runs/{run}", *files, *arguments, cwd=project)
    assert done.code == code, done.out + done.err
    return done


def written(project: Path) -> list[dict]:
    return [json.loads(line) for line in (project / "out.jsonl").read_text().splitlines()]


TEXTS = ["load good", "load load load load bad", "load bad", "good"]


def write_unlabelled(project: Path) -> None:
    (project / "new.tsv").write_text("".join(f"{number}\t{text}\n" for number, text in enumerate(TEXTS)))


@pytest.mark.parametrize("run", some(["classes", "translation", "instructions", "own"], 2))
def test_every_record_in_order_with_its_prediction(project: Path, run: str) -> None:
    write_unlabelled(project)
    done = predict(project, run, "new.tsv", "data.columns=[id, text]", "eval.micro_batch=2")
    found = written(project)
    assert [(record["id"], record["text"]) for record in found] == [(str(i), text) for i, text in enumerate(TEXTS)]
    assert all(isinstance(record["prediction"], str) for record in found)
    if run == "classes":
        assert {record["prediction"] for record in found} <= {"good", "bad"}
    assert "4 records" in done.out
    assert not list(project.glob("*.tmp"))


def test_probabilities_are_written_when_they_are_asked_for(project: Path) -> None:
    write_unlabelled(project)
    predict(project, "classes", "new.tsv", "data.columns=[id, text]", "--probabilities")
    for record in written(project):
        shares = record["probabilities"]
        assert shares.keys() == {"good", "bad"}
        assert sum(shares.values()) == pytest.approx(1)
        assert record["prediction"] == max(shares, key=shares.get)


@pytest.mark.parametrize("run", ["classes", "translation", "instructions", "own"])
def test_the_predictions_are_those_of_the_evaluation(project: Path, run: str) -> None:
    """Labels that are there make no difference."""
    done = run_cli("eval", f"runs/{run}", "--split", "test", "data.test=train.tsv", cwd=project)
    assert done.code == 0, done.err
    lines = (project / "runs" / run / "eval" / "test" / "predictions.jsonl").read_text().splitlines()
    predict(project, run, "train.tsv")
    assert [record["prediction"] for record in written(project)] == [json.loads(line)["prediction"] for line in lines]
    if run == "own":
        assert all(record["prediction"] == record["label"] for record in written(project))


def predict_on_a_rank(project: str) -> None:
    with chdir(project):
        loaded = load_run("runs/classes", ("data.test=new.txt", "eval.micro_batch=1"), None)
        predict_from_run(loaded.config, None, Path("out.jsonl"), None)


def test_two_processes_write_the_same(project: Path) -> None:
    (project / "new.txt").write_text("\n".join(TEXTS[:3]))
    predict(project, "classes", "new.txt")
    alone = written(project)
    (project / "out.jsonl").unlink()
    run_ranks(predict_on_a_rank, 2, str(project))
    assert written(project) == alone
    assert len(alone) == 3


def test_a_record_without_a_prediction_has_a_line(project: Path) -> None:
    lines = ['{"text": "a good"}', '{"text": ', '{"words": 1}', '{"text": "nothing"}', '{"text": "twice good"}']
    (project / "new.jsonl").write_text("\n".join(lines))
    done = predict(project, "own", "new.jsonl", "data.on_bad_record=skip", "data.limit.test=5")
    one, bad, other, dropped, twice = written(project)
    assert one["prediction"] in ("good", "bad")
    assert bad["prediction"] is None
    assert "new.jsonl:2: the line is not valid JSON" in bad["error"]
    assert other == {"words": 1, "prediction": None}
    assert dropped == {"text": "nothing", "prediction": None}
    assert len(twice["prediction"]) == 2
    assert "5 records, 3 without prediction" in done.out
    assert "new.jsonl:3" in done.err


def test_values_that_json_does_not_know(project: Path) -> None:
    columns = {"text": ["load good", "bad"], "day": [date(2024, 2, 29), None], "votes": [[1, 2], []]}
    pyarrow.parquet.write_table(pyarrow.table(columns), project / "new.parquet")
    predict(project, "own", "new.parquet")
    one, other = written(project)
    assert (one["text"], one["day"], one["votes"]) == ("load good", "2024-02-29", [1, 2])
    assert (other["text"], other["day"], other["votes"]) == ("bad", None, [])


def test_columns_are_named_and_renamed_as_in_training(project: Path) -> None:
    lines = [json.dumps({"sentence": text, "sentiment": text.split()[-1]}) for text in TEXTS]
    (project / "train.jsonl").write_text("\n".join(lines))
    settings = ("data.train=train.jsonl", "data.columns=null", "data.rename={text: sentence, label: sentiment}")
    done = run_cli("train", "classes.yaml", *settings, "run.name=renamed", cwd=project)
    assert done.code == 0, done.err
    (project / "new.csv").write_text("sentence\nload good\n")
    predict(project, "renamed", "new.csv", "data.rename=null", "data.rename.text=sentence")
    (found,) = written(project)
    assert found["text"] == "load good"
    assert found["prediction"] in ("good", "bad")


def test_a_limit_of_the_run_loses_no_input(project: Path) -> None:
    config = project / "runs" / "own" / "config.yaml"
    config.write_text(config.read_text().replace("test: null", "test: 1"))
    assert "test: 1" in config.read_text()
    write_unlabelled(project)
    predict(project, "own", "new.tsv", "data.columns=[id, text]")
    assert len(written(project)) == len(TEXTS)


@pytest.mark.parametrize(
    ("run", "source", "arguments", "says"),
    [
        ("text", "new.tsv", (), ("CausalLM makes no predictions", "task.generation")),
        ("own", "new.tsv", ("--probabilities",), ("Ending returns no probabilities", "probabilities(model, batch)")),
        ("classes", "nwe.tsv", (), ("there is no file nwe.tsv", "--input", "new.tsv")),
        ("classes", "new.tsv", ("data.columns=[id]",), ("new.tsv:1", "2 fields", "data.columns=[")),
        ("classes", "new.tsv", ("data.columns=[id, txt]",), ("new.tsv:1", "has no 'text'")),
        ("own", "new.tsv", ("data.columns=[id, txt]",), ("encode", "self.has_labels")),
        ("classes", "new.tsv", ("data.rename={label: sentiment}",), ("'sentiment'", "data.rename=null")),
        ("classes", "new.tsv", ("--checkpoint", "999"), ("999", "12")),
        ("nothing", "new.tsv", (), ("not a run directory",)),
        ("classes", "new.tsv", ("data.test=x.tsv",), ("no file x.tsv",)),
    ],
)
def test_a_request_that_is_wrong(
    trained: Path, run: str, source: str, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    write_unlabelled(trained)
    columns = () if any("data.columns" in word for word in arguments) else ("data.columns=[id, text]",)
    done = predict(trained, run, source, *columns, *arguments, code=2)
    check_one_message(done.out + done.err, *says)
    assert not (trained / "out.jsonl").exists()


def test_data_to_predict_for_are_named_with_input(trained: Path) -> None:
    done = run_cli("predict", "runs/classes", "--output", "out.jsonl", cwd=trained)
    assert done.code == 2
    check_one_message(done.out + done.err, "there is no test data", "name a file with --input FILE")


def test_an_output_that_is_there_stays(trained: Path) -> None:
    write_unlabelled(trained)
    there = trained / "there.jsonl"
    there.write_text("mine")
    for arguments in (("predict", "runs/classes", "--input", "new.tsv"), ("generate", "runs/text")):
        done = run_cli(*arguments, "--output", there.name, cwd=trained)
        assert done.code == 2
        check_one_message(done.out + done.err, "there.jsonl already exists", "--overwrite")
        done = run_cli(*arguments, "--output", "runs", cwd=trained)
        check_one_message(done.out + done.err, "runs is a folder", "--output")
        done = run_cli(*arguments, "--output", "new/", cwd=trained)
        check_one_message(done.out + done.err, "new/ is a folder", "--output")
        done = run_cli(*arguments, "--output", "there.jsonl/out.jsonl", cwd=trained)
        check_one_message(done.out + done.err, "cannot write there.jsonl/out.jsonl", "--output")
        for mine in (there.name, "new.tsv", "runs/classes/metrics.jsonl"):
            done = run_cli(*arguments, "--output", mine, "--overwrite", cwd=trained)
            assert done.code == 2
            check_one_message(done.out + done.err, "already exists, and is not an output of this command", "--output")
    assert there.read_text() == "mine"


def test_outputs_that_are_streams_or_links_stay_what_they_are(project: Path) -> None:
    write_unlabelled(project)
    (project / "disk").mkdir()
    (project / "disk" / "real.jsonl").write_text('{"prediction": "old"}\n')
    (project / "out.jsonl").symlink_to("disk/real.jsonl")
    predict(project, "classes", "new.tsv", "data.columns=[id, text]", "--overwrite")
    assert len(written(project)) == len(TEXTS)
    assert (project / "out.jsonl").is_symlink()
    for options in (
        ("predict", "runs/classes", "--input", "new.tsv", "data.columns=[id, text]"),
        ("generate", "runs/text"),
    ):
        done = run_cli(*options, "--output", "/dev/stdout", cwd=project)
        assert done.code == 0, done.err
        assert all(json.loads(line) for line in done.out.splitlines()), "nothing else is said there"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.txt", "load\n\nthe load is\n"),
        ("prompts.jsonl", '{"prompt": "load", "text": "not this"}\n{"text": "the load is"}\n'),
    ],
)
def test_generate_from_a_file(trained: Path, name: str, content: str) -> None:
    (trained / name).write_text(content)
    short = ("--max-new-tokens", "4", "--temperature", "0")
    done = run_cli("generate", "runs/text", "--input", name, "--output", "new/texts.jsonl", *short, cwd=trained)
    assert done.code == 0, done.err
    found = [json.loads(line) for line in (trained / "new" / "texts.jsonl").read_text().splitlines()]
    shutil.rmtree(trained / "new")
    assert [line["prompt"] for line in found] == ["load", "the load is"]
    printed = run_cli("generate", "runs/text", "--input", name, *short, cwd=trained)
    assert printed.out == f"\n{'-' * 40}\n".join(line["prompt"] + line["text"] for line in found) + "\n"


def test_a_record_that_is_no_prompt(trained: Path) -> None:
    (trained / "prompts.jsonl").write_text('{"text": "load"}\n{"txt": "load"}\n')
    done = run_cli("generate", "runs/text", "--input", "prompts.jsonl", cwd=trained)
    assert done.code == 2
    check_one_message(done.out + done.err, "no prompt", "prompts.jsonl:2")
