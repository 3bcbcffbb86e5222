"""``drawbar.load_run``: a run opened in Python says what the command line says of it."""

import json
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drawbar
from conftest import make_project
from drawbar.commands import score_run
from drawbar.commands.score_run import evaluate_run, predict_from_run
from drawbar.commands.trained_run import TrainedRun
from drawbar.errors import UserError
from drawbar.report.recorded_run import RecordedRun
from drawbar.tasks.batch import Batch
from drawbar.tracking.run_view import Progress
from runs import fit_in, weights

BERT = "{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}"
BYTES = "{train: byte_bpe, vocab_size: 260}"
TAGS = [{"tokens": ["the", "load"], "tags": ["O", "B-X"]}, {"tokens": [], "tags": []}, {"tokens": ["a"], "tags": ["O"]}]
CLASSES = [{"text": text, "label": label} for text in ("the load", "") for label in ("good", "bad")] * 4
TOPICS = [{"text": "the load", "label": ["road", "hill"]}, {"text": "wind", "label": []}] * 4
RATINGS = [{"text": "the load", "label": 0.5}, {"text": "wind", "label": 1.5}] * 4
DATA = {"classes": CLASSES, "tags": TAGS * 3, "topics": TOPICS, "ratings": RATINGS}


class Parity(drawbar.Task):
    """Is a number even? Of a script, which ``task.type`` does not name."""

    def encode(self, record: dict[str, Any], train: bool) -> Any:
        sample = {"x": [float(record["number"]), 1.0]}
        return {**sample, "labels": record["number"] % 2} if self.has_labels else sample

    def build_model(self) -> nn.Module:
        self.names = [False, True]
        return nn.Linear(2, 2)

    def collate(self, samples: list[Any]) -> Batch:
        assert self.has_labels == ("labels" in samples[0])
        return super().collate(samples)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return model(batch["x"])

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum")

    def predict(self, model: nn.Module, batch: Batch) -> list[Any]:
        return [self.names[number] for number in self.forward(model, batch).argmax(-1).tolist()]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with a run of each kind of labels, and one that writes; it is the current folder."""
    folder = make_project(tmp_path_factory.mktemp("trained"))
    fit_in(folder, "train.steps=2", "optim.warmup=0")
    for name, records in DATA.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        kind = "token_classification" if name == "tags" else "sequence_classification"
        problem = {"topics": "multi_label", "ratings": "regression"}.get(name)
        task = f"task={{type: {kind}, model: bert, from_scratch: {BERT}, tokenizer: {BYTES}}}"
        more = [f"task.problem={problem}"] if problem else []
        settings = [f"run.name={name}", f"data.train={name}.jsonl", f"data.validation={name}.jsonl", "optim.warmup=0"]
        (folder / "plain.yaml").write_text("train: {global_batch: 4, steps: 2}\ndevice: cpu\nprecision: fp32\n")
        with chdir(folder):
            loaded = drawbar.load_config("plain.yaml", [task, *more, *settings])
            drawbar.Trainer(loaded.config).fit()
    with chdir(folder):
        yield folder


def test_predictions_and_probabilities_are_those_of_the_command(project: Path) -> None:
    run = drawbar.load_run("runs/classes", "data.test=classes.jsonl")
    predict_from_run(run.config, None, project / "out.jsonl", None, probabilities=True)
    written = [json.loads(line) for line in (project / "out.jsonl").read_text().splitlines()]
    records = [{"text": record["text"]} for record in CLASSES]
    assert run.predict(records) == [line["prediction"] for line in written]
    for shares, line in zip(run.probabilities(records), written, strict=True):
        assert shares == pytest.approx(line["probabilities"])
        assert sum(shares.values()) == pytest.approx(1)
        assert max(shares, key=lambda name: shares[name]) == line["prediction"]
    assert run.task.has_labels


def test_an_input_that_changes_while_it_is_predicted_for_is_no_output(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prediction would stand beside another record."""
    path = project / "changing.jsonl"
    lines = [json.dumps(record) + "\n" for record in CLASSES]
    path.write_text("".join(lines))
    run = drawbar.load_run("runs/classes", "data.test=changing.jsonl")
    predict = score_run.predict

    def meddle(*arguments: Any, **options: Any) -> Any:
        path.write_text("".join(lines[::-1]))
        return predict(*arguments, **options)

    monkeypatch.setattr(score_run, "predict", meddle)
    with pytest.raises(UserError, match="the test data changed while they were read"):
        predict_from_run(run.config, None, project / "changed.jsonl", None)
    assert not (project / "changed.jsonl").exists()


def test_words_have_probabilities_of_their_own(project: Path) -> None:
    run = drawbar.load_run("runs/tags")
    records = [{"tokens": record["tokens"]} for record in TAGS]
    one, dropped, other = run.probabilities(records)
    assert dropped is None
    assert run.predict(records)[1] is None
    assert (len(one), len(other)) == (2, 1)
    for shares in (*one, *other):
        assert shares.keys() == {"O", "B-X"}
        assert sum(shares.values()) == pytest.approx(1)
    assert run.predict([{"tokens": []}]) == [None]


def test_each_of_several_labels_has_a_probability_by_itself(project: Path) -> None:
    run = drawbar.load_run("runs/topics")
    for shares, chosen in zip(run.probabilities(TOPICS), run.predict(TOPICS), strict=True):
        assert [name for name, share in shares.items() if share > 0.5] == chosen


def test_numbers_and_texts_have_no_probabilities(project: Path) -> None:
    with pytest.raises(drawbar.UserError, match="returns no probabilities"):
        drawbar.load_run("runs/ratings").probabilities(RATINGS)
    with pytest.raises(drawbar.UserError, match="CausalLM makes no predictions") as none:
        drawbar.load_run("runs/tiny").predict([{"text": "the load"}])
    assert "or set task.generation" in str(none.value.remedy)


@pytest.mark.parametrize("records", [{"text": "the load"}, ["the load"], [{"text": "a"}, ""]])
def test_what_is_no_list_of_records(records: Any, project: Path) -> None:
    with pytest.raises(drawbar.UserError, match=r"a record is a dict of columns, but '.*' is of type str"):
        drawbar.load_run("runs/classes").predict(records)


def test_a_split_that_is_none(project: Path) -> None:
    with pytest.raises(drawbar.UserError, match="there is no split 'val'"):
        drawbar.load_run("runs/classes").evaluate("val")


def test_numbers_have_no_scores_of_labels(project: Path) -> None:
    settings = ("task.metrics=[accuracy,pearson,f1_macro]", "run.name=unfit")
    loaded = drawbar.load_config("runs/ratings/config.yaml", settings)
    with pytest.raises(drawbar.UserError, match=r"^accuracy, f1_macro: a score of labels; a regression predicts"):
        drawbar.Trainer(loaded.config).fit()


def test_the_scores_are_those_of_eval(project: Path) -> None:
    run = drawbar.load_run("runs/classes")
    assert run.evaluate() == evaluate_run(run.config, None, "validation", None)


def test_the_model_of_a_checkpoint_writes(project: Path) -> None:
    run = drawbar.load_run(project / "runs" / "tiny", "device=cpu", checkpoint="2")
    assert isinstance(run, TrainedRun)
    assert (run.step, run.model.training) == (2, False)
    for name, tensor in weights(project / "runs" / "tiny", 2).items():
        assert torch.equal(run.model.state_dict()[name], tensor)
    assert repr(run).endswith("runs/tiny, step 2: LlamaForCausalLM, 34,720 parameters>")
    assert [values["step"] for values in run.history() if "train/loss" in values][:2] == [1, 2]
    texts = run.generate(["the engine", "the hill"], max_new_tokens=5, temperature=0)
    assert len(texts) == 2
    assert run.generate("the hill", max_new_tokens=5, temperature=0) == texts[1:]
    assert run.generate([]) == []
    assert run.tokenizer.decode(run.tokenizer("the hill")["input_ids"], skip_special_tokens=True) == "the hill"


def test_a_task_of_a_script_is_given(tmp_path: Path) -> None:
    (tmp_path / "numbers.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in range(8)))
    (tmp_path / "config.yaml").write_text("data: {train: numbers.jsonl}\ntrain: {steps: 2}\ndevice: cpu\n")
    fit_in(tmp_path, task=Parity)
    run = drawbar.load_run(tmp_path / "runs" / "run", task=Parity)
    assert set(run.predict({"number": number} for number in range(4))) <= {0, 1}
    assert run.tokenizer is None
    with pytest.raises(drawbar.UserError, match="the task of this run is the class Parity of the script "):
        drawbar.load_run(tmp_path / "runs" / "run")
    named = drawbar.load_run(tmp_path / "runs" / "run", f"task.type={__name__}:Parity")
    assert len(named.predict([{"number": 3}])) == 1


class Other(Parity):
    """The same, by another name."""


def test_a_run_of_a_script_goes_on_with_its_own_class_alone(tmp_path: Path) -> None:
    (tmp_path / "numbers.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in range(8)))
    (tmp_path / "config.yaml").write_text("data: {train: numbers.jsonl}\ntrain: {steps: 2}\ndevice: cpu\n")
    fit_in(tmp_path, task=Parity)
    state = (tmp_path / "runs" / "run" / "status.json").read_text()
    for wrong in (drawbar.CausalLM, Other):
        with pytest.raises(
            drawbar.UserError, match=rf"is the class Parity of the script .*, and this is {wrong.__name__}"
        ):
            fit_in(tmp_path, "train.steps=4", task=wrong)
    with chdir(tmp_path), pytest.raises(drawbar.UserError, match=r"the class Parity of the script .* does not know"):
        drawbar.load_config("runs/run/config.yaml")
    assert (tmp_path / "runs" / "run" / "status.json").read_text() == state
    fit_in(tmp_path, "train.steps=4", task=Parity)
    assert [path.name for path in (tmp_path / "runs" / "run" / "checkpoints").glob("step-*4")] == ["step-00000004"]
    assert RecordedRun(tmp_path / "runs" / "run", "complete", Progress()).task == f"Parity ({Path(__file__).name})"


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(drawbar.UserError, match="is not a run directory"):
        drawbar.load_run(tmp_path)
