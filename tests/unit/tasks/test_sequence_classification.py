"""sequence_classification: labels and what becomes of them, texts and pairs of them, and whole runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional
from transformers import BertConfig, BertModel, BertTokenizerFast, PreTrainedTokenizerBase

import drawbar
from drawbar.commands.score_run import evaluate_run
from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import SequenceClassificationConfig
from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.tokenizer import load_tokenizer, train_byte_bpe, wrap_texts
from drawbar.errors import UserError
from drawbar.tasks.batch import Batch
from drawbar.tasks.classification import SequenceClassification
from drawbar.tasks.task_context import TaskContext
from runs import fit_in

TOKENIZER = wrap_texts(train_byte_bpe(["a good road and a bad road"] * 9, 280, {"pad_token": "<|pad|>"}), "begin_end")
END, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
BERT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CONFIG = """\
run: {name: tiny}
task:
  type: sequence_classification
  model: bert
  from_scratch: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2,
                 max_position_embeddings: 64}
  tokenizer: {train: byte_bpe, vocab_size: 280}
data: {train: train.jsonl, validation: train.jsonl, sequence_length: 32}
train: {global_batch: 8, steps: 30}
optim: {lr: 1.0e-2}
precision: fp32
device: cpu
tracking: {tensorboard: false}
"""


def task_of(
    labels: list[Any] | None = None,
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    sequence_length: int = 64,
    **options: Any,
) -> SequenceClassification:
    config = SequenceClassificationConfig(model="bert", from_scratch=BERT, **options)
    run_config = RunConfig(task=config, data=DataSection(sequence_length=sequence_length))
    return SequenceClassification(TaskContext(run_config, tokenizer, {"labels": labels}))


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def labels_found(folder: Path, in_data: list[Any], **options: Any) -> list[Any]:
    path = write(folder / "train.jsonl", [{"text": "a road", "label": label} for label in in_data])
    data = DataSection(train=str(path), on_bad_record=options.pop("on_bad_record", "error"))
    config = SequenceClassificationConfig(model="bert", from_scratch=BERT, **options)
    return SequenceClassification(RunConfig(task=config, data=data)).find_dataset_metadata()["labels"]


def encoded(task: SequenceClassification, records: list[dict[str, Any]]) -> EncodedDataset:
    return encode_records(records, lambda record: task.encode(record, True), describe=str)


def target(task: SequenceClassification, label: Any) -> Any:
    return task.encode({"text": "a road", "label": label}, True)["labels"]


@pytest.mark.parametrize(
    ("in_data", "found"),
    [
        (["good", "bad", "good"], ["bad", "good"]),
        ([10, 9, 1], [1, 9, 10]),
        (["10", "9", "1"], ["1", "9", "10"]),
        ([True, False], [False, True]),
        (["x", "2", "1"], ["1", "2", "x"]),
        (["x", "nan", "2", "inf", "1"], ["1", "2", "inf", "nan", "x"]),
        ([4.0, 1.0], [1.0, 4.0]),
    ],
)
def test_labels_are_those_of_the_training_data_in_order(in_data: list[Any], found: list[Any], tmp_path: Path) -> None:
    labels = labels_found(tmp_path, in_data)
    assert labels == found
    assert [type(label) for label in labels] == [type(label) for label in found]


def test_a_label_written_as_number_and_as_text_is_one(tmp_path: Path) -> None:
    labels = labels_found(tmp_path, [1, "0", "1", 0])
    assert labels == ["0", 1]  # as each was written first
    task = task_of(labels)
    assert [target(task, label) for label in (0, "0", 1, "1")] == [0, 0, 1, 1]
    records = [{"label": label} for label in (0, "0", 1, "1")]
    assert task.references(records) == ["0", "0", 1, 1]


def test_one_and_true_are_one_label(tmp_path: Path) -> None:
    """As they are to Python: a column that was written by several programs has no more classes for that."""
    assert labels_found(tmp_path, [1, 1.0, True, "1", "1.0", "TRUE", False, 0, 0.0, "false", "0.0"]) == [False, 1]
    task = task_of([False, 1])
    assert [target(task, label) for label in (True, 1.0, "true", "1", 0, 0.0, "False")] == [1, 1, 1, 1, 0, 0, 0]
    assert labels_found(tmp_path, ["01", "1", 1.5, "1.50"]) == ["01", "1", 1.5, "1.50"]


def test_two_labels_that_are_given_are_not_the_same(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 and '1.0' are the same label[\s\S]*task.labels"):
        labels_found(tmp_path, ["good"], labels=[0, 1, "1.0"])


def test_the_labels_that_are_found_are_said_with_their_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    labels_found(tmp_path, ["good", "bad", "good"])
    assert "labels in 'label' of the training data: bad 1, good 2" in caplog.text
    labels_found(tmp_path, [f"{number:02}" for number in range(23)] * 2)
    assert caplog.text.rstrip().endswith("19 2 and 3 more labels")


def test_a_column_of_ids_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels_found(tmp_path, [*range(300), 7])
    assert "'label' has 300 different labels in 301: nearly every one is a class of its own" in caplog.text
    caplog.clear()
    for few in (list(range(20)), [*range(300)] * 2):
        labels_found(tmp_path, few)
    assert "class of its own" not in caplog.text


def test_labels_that_only_look_the_same_are_shown_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    labels_found(tmp_path, ["a", " a", "b", "\u00e9", "e\u0301", "Yes", "yes", "no"])
    assert "' a' 1" in caplog.text
    assert r"' a' and 'a', 'Yes' and 'yes', 'e\u0301' and '\xe9'; where they mean" in caplog.text
    caplog.clear()
    labels_found(tmp_path, ["a", "b", 1, "1.5"])
    assert "classes of their own" not in caplog.text


@pytest.mark.parametrize(
    ("found", "labels"),
    [
        ([0.5, 1.0, 2], [0.5, 1.0, 2.0]),
        ([3.0, 1, 2.0], [1, 2, 3]),
        ([1.0, 2.0], [1.0, 2.0]),
        ([0.5, "a", 2], [0.5, 2, "a"]),
    ],
)
def test_labels_that_are_numbers_are_of_one_kind(tmp_path: Path, found: list[Any], labels: list[Any]) -> None:
    assert list(map(repr, labels_found(tmp_path, found))) == list(map(repr, labels))


def test_an_unknown_label_is_told_how_many_there_are() -> None:
    with pytest.raises(UserError, match=r"none of the task's: .*, 19 and 40 more labels"):
        target(task_of(list(range(60))), 60)


@pytest.mark.parametrize(
    ("labels", "problem", "hinted"),
    [
        (["0.1", "0.25", "2"], "single_label", True),
        (["0.1", "0.25", "high"], "single_label", False),
        ([0, 1], "single_label", False),
        (["0.1", "0.25", "2"], "multi_label", False),
    ],
)
def test_an_unknown_number_may_be_one_to_learn(labels: list[Any], problem: str, hinted: bool) -> None:
    with pytest.raises(UserError, match="none of the task's") as caught:
        target(task_of(labels, problem=problem), [0.5] if problem == "multi_label" else 0.5)
    assert ("use task.problem=regression" in str(caught.value.remedy)) is hinted


def test_labels_that_are_given_keep_their_order(tmp_path: Path) -> None:
    assert labels_found(tmp_path, ["good"], labels=["worse", "good", "bad"]) == ["worse", "good", "bad"]
    task = task_of([False, True])
    assert task.labels.model_fields()["id2label"] == {0: "False", 1: "True"}


@pytest.mark.parametrize(
    ("in_data", "message"),
    [
        (["good"], "only one value"),
        (list(range(1001)), "1,001 different values"),
        ([["good"], ["bad"]], r"which is no label[\s\S]*train.jsonl:1"),
        (["good", "bad", None], r"NoneType[\s\S]*train.jsonl:3"),
        (["good", {"a": 1}], r"which is no label[\s\S]*train.jsonl:2"),
        (["good", float("nan"), "bad"], r"'label' holds nan, which is no label[\s\S]*train.jsonl:2"),
        ([1, 2, float("-inf")], r"holds -inf[\s\S]*train.jsonl:3"),
        (["good", "bad", " "], r"an empty label[\s\S]*train.jsonl:3[\s\S]*data.on_bad_record=skip"),
    ],
)
def test_what_cannot_be_labels_is_refused(in_data: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        labels_found(tmp_path, in_data)


def test_bad_labels_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    found = labels_found(tmp_path, ["good", None, ["x"], "bad"], on_bad_record="skip")
    assert found == ["bad", "good"]
    several = labels_found(tmp_path, [["x"], "y", [], ["z", "x"]], on_bad_record="skip", problem="multi_label")
    assert several == ["x", "z"]


def test_a_stream_needs_a_list_of_labels(tmp_path: Path) -> None:
    data = DataSection(train=str(write(tmp_path / "train.jsonl", [{"text": "a", "label": "b"}])), streaming=True)
    task = SequenceClassification(
        RunConfig(task=SequenceClassificationConfig(model="bert", from_scratch=BERT), data=data)
    )
    with pytest.raises(UserError, match=r"a stream[\s\S]*task.labels"):
        task.find_dataset_metadata()


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"label": "good"}, {}, "no 'text'"),
        ({"text": 3, "label": "good"}, {}, "'text' is int, not str"),
        ({"text": "a road"}, {}, "no 'label'"),
        ({"text": "a road", "label": "new"}, {}, r"'new' is none of the task's: bad, good"),
        ({"text": "a road", "label": None}, {}, "which is no label"),
        ({"text": "a road", "label": float("nan")}, {}, "which is no label"),
        ({"text": "a road", "label": ""}, {}, "an empty label"),
        ({"text": "a road", "label": ["good", ""]}, {"problem": "multi_label"}, "an empty label"),
        ({"text": "a road", "label": "good"}, {"text_pair_column": "other"}, "no 'other'"),
        ({"text": "a road", "label": "good"}, {"problem": "multi_label"}, "not a list of labels"),
        ({"text": "a road", "label": [["good"]]}, {"problem": "multi_label"}, "which is no label"),
        ({"text": "a road", "label": "good"}, {"problem": "regression"}, "'good', which is no number"),
        ({"text": "a road", "label": float("nan")}, {"problem": "regression"}, "no number"),
        ({"text": "a road", "label": None}, {"problem": "regression"}, "no number"),
    ],
)
def test_a_bad_record_is_refused(record: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_of(["bad", "good"], **options).encode(record, True)


def test_several_labels_and_numbers() -> None:
    several = task_of(["x", "y", "z"], problem="multi_label")
    assert target(several, ["z", "x"]).tolist() == [1, 0, 1]
    assert target(several, []).tolist() == [0, 0, 0]
    number = task_of(problem="regression")
    assert [target(number, label) for label in (2, -0.5, "1e3")] == [2.0, -0.5, 1000.0]


@pytest.mark.parametrize(
    ("problem", "metrics"),
    [
        ("single_label", ["accuracy"]),
        ("multi_label", ["f1_micro"]),
        ("regression", ["pearson", "spearman"]),
    ],
)
def test_usual_metrics(problem: str, metrics: list[str]) -> None:
    assert list(task_of(["a", "b"], problem=problem).metrics) == metrics
    assert list(task_of(["a", "b"], problem=problem, metrics=["mse"]).metrics) == ["mse"]
    assert list(task_of(["a", "b"], problem=problem, metrics=[]).metrics) == []


@pytest.mark.parametrize("problem", ["single_label", "multi_label", "regression"])
def test_the_loss_is_a_sum_over_what_weight_counts(problem: str) -> None:
    torch.manual_seed(0)
    labels = {"single_label": ["x", "z", "y"], "multi_label": [["x"], [], ["y", "z"]], "regression": [1.5, 0, -2]}
    task = task_of(None if problem == "regression" else ["x", "y", "z"], problem=problem)
    samples = encoded(
        task, [{"text": "a road" * (1 + number), "label": label} for number, label in enumerate(labels[problem])]
    )
    model = task.build_model().eval()
    alone = [task.collate([samples[number]]) for number in range(3)]
    together = task.collate([samples[number] for number in range(3)])
    assert task.num_targets(together) == {"single_label": 3, "multi_label": 9, "regression": 3}[problem]
    found = task.loss(task.forward(model, together), together).item()
    assert found == pytest.approx(sum(task.loss(task.forward(model, one), one).item() for one in alone), rel=1e-5)

    logits = task.forward(model, together).logits
    by_hand = {
        "single_label": lambda: functional.cross_entropy(logits, torch.tensor([0, 2, 1])),
        "multi_label": lambda: functional.binary_cross_entropy(
            logits.sigmoid(), torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 1, 1]])
        ),
        "regression": lambda: ((logits[:, 0] - torch.tensor([1.5, 0, -2])) ** 2).mean(),
    }[problem]()
    assert found / task.num_targets(together) == pytest.approx(by_hand.item(), rel=1e-5)

    predictions = task.predict(model, together)
    assert len(predictions) == 3
    wanted = {"single_label": str, "multi_label": list, "regression": float}[problem]
    assert all(type(prediction) is wanted for prediction in predictions)


@pytest.mark.parametrize("weights", [None, {"x": 0.5, "z": 2.0}, "balanced"])
def test_weights_of_classes_and_label_smoothing_are_torchs_own(weights: Any, tmp_path: Path) -> None:
    """Also in an evaluation, but for the smoothing: weighted losses there are those that training lowers."""
    labels = ["x", "z", "y", "z", "z"]
    records = [{"text": "a road" * (1 + number), "label": label} for number, label in enumerate(labels)]
    data = DataSection(train=str(write(tmp_path / "train.jsonl", records)), sequence_length=64)
    config = SequenceClassificationConfig(model="bert", from_scratch=BERT, class_weights=weights, label_smoothing=0.1)
    context = TaskContext(RunConfig(task=config, data=data), TOKENIZER)
    task = SequenceClassification(context)
    batch = task.collate(list(encoded(task, records)))
    model = task.build_model().eval()
    outputs = task.forward(model, batch)
    given = {"x": 0.5, "y": 1.0, "z": 2.0} if weights else dict.fromkeys("xyz", 1.0)
    if weights == "balanced":
        given = dict(zip("xyz", compute_class_weight("balanced", classes=np.array(list("xyz")), y=labels), strict=True))
    wanted = {
        smoothing: functional.cross_entropy(
            outputs.logits, batch["labels"], torch.tensor(list(given.values())).float(), label_smoothing=smoothing
        )
        for smoothing in (0.0, 0.1)
    }
    targets = task.num_targets(batch)
    assert targets == pytest.approx(sum(given[label] for label in labels))
    torch.testing.assert_close(task.loss(outputs, batch) / targets, wanted[0.1], rtol=1e-6, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(task.loss(outputs, batch) / targets, wanted[0.0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"class_weights": {"w": 2.0}}, "task.class_weights"),
        ({"class_weights": {"x": 2.0}, "problem": "multi_label"}, "task.class_weights"),
        ({"class_weights": "balanced"}, "task.class_weights"),  # of a fork, say, whose labels were not counted
        ({"label_smoothing": 0.1, "problem": "regression"}, "task.label_smoothing"),
    ],
)
def test_weights_that_fit_no_class_are_refused(options: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError) as caught:
        task_of(["x", "y"], **options).num_targets(Batch({"labels": torch.tensor([0])}, [0]))
    assert caught.value.where == where


def test_padding_does_not_change_a_text() -> None:
    torch.manual_seed(0)
    task = task_of(["a", "b"])
    samples = encoded(task, [{"text": "a bad road", "label": "a"}, {"text": "a good road " * 5, "label": "b"}])
    model = task.build_model().eval()
    alone = task.forward(model, task.collate([samples[0]])).logits[0]
    batch = task.collate([samples[0], samples[1]])
    assert batch["input_ids"][0, -1] == PAD
    assert torch.allclose(task.forward(model, batch).logits[0], alone, atol=1e-5)


TEXTS = st.text(alphabet="abcd 文", max_size=60)


@given(text=TEXTS, pair=st.none() | TEXTS, sequence_length=st.integers(4, 40))
def test_the_longer_text_is_cut_and_special_tokens_stay(text: str, pair: str | None, sequence_length: int) -> None:
    options = {} if pair is None else {"text_pair_column": "pair"}
    task = task_of(["a"], sequence_length=sequence_length, **options)
    sample = task.encode({"text": text, "pair": pair, "label": "a"}, True)
    texts = [text, pair] if pair else [text]  # to transformers, an empty second text is none
    whole = [TOKENIZER(one, add_special_tokens=False)["input_ids"] for one in texts]
    too_long = sum(map(len, whole)) + len(whole) + 1 > sequence_length
    assert sample.get("truncated", False) is too_long
    tokens = list(sample["input_ids"])
    assert len(tokens) == min(sequence_length, sum(map(len, whole)) + len(whole) + 1)
    assert (tokens[0], tokens[-1], tokens.count(END)) == (END, END, 1 + len(whole))
    kept, rest = [], tokens[1:]
    for one in whole:
        kept.append(rest[: rest.index(END)])
        rest = rest[len(kept[-1]) + 1 :]
        assert kept[-1] == one[: len(kept[-1])]
    if too_long and pair:  # nothing is cut from a text that is shorter than what is left of the other
        lost = [len(one) - len(left) for one, left in zip(whole, kept, strict=True)]
        for mine, other in ((0, 1), (1, 0)):
            assert not lost[mine] or len(kept[mine]) >= len(kept[other]) - 1


def test_cut_samples_are_counted() -> None:
    task = task_of(["a", "b"], sequence_length=8)
    samples = encoded(task, [{"text": text, "label": "a"} for text in ("a", "a good road" * 9, "xyzw" * 9)])
    assert samples.truncated == 2
    assert samples.lengths.tolist()[1:] == [8, 8]


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pretrained BERT with a WordPiece tokenizer, which frames texts and pairs itself."""
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "road", "is", "##ly"]
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), **BERT)).save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder


def test_a_pretrained_tokenizer_frames_pairs(bert_folder: Path) -> None:
    tokenizer = load_tokenizer(str(bert_folder))
    task = task_of(["x", "y"], tokenizer, text_pair_column="pair")
    record = {"text": "a badly road", "pair": "is good", "label": "y"}
    sample = task.encode(record, True)
    pieces = ["[CLS]", "a", "bad", "##ly", "road", "[SEP]", "is", "good", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(sample["input_ids"]) == pieces
    assert sample["token_type_ids"] == [0] * 6 + [1] * 3
    assert "truncated" not in sample
    samples = encoded(task, [record, {**record, "text": "a"}])
    batch = task.collate([samples[0], samples[1]])
    assert batch["token_type_ids"].tolist() == [[0] * 6 + [1] * 3, [0] * 3 + [1] * 3 + [0] * 3]
    assert batch["attention_mask"].sum(1).tolist() == [9, 6]
    torch.manual_seed(0)
    model = task.build_model().eval()
    logits = task.forward(model, batch).logits
    del batch["token_type_ids"]
    assert not torch.allclose(task.forward(model, batch).logits, logits)  # the model is told which text is which

    cut = task_of(["x", "y"], tokenizer, sequence_length=7, text_pair_column="pair").encode(record, True)
    assert tokenizer.convert_ids_to_tokens(cut["input_ids"]) == ["[CLS]", "a", "bad", "[SEP]", "is", "good", "[SEP]"]
    assert cut["token_type_ids"] == [0] * 4 + [1] * 3
    assert cut["truncated"] is True


def test_what_is_put_around_a_text_is_a_setting(tmp_path: Path) -> None:
    train_byte_bpe([], 257).save_pretrained(str(tmp_path))
    for setting, special in (("auto", 0), ("none", 0), ("begin", 1), ("end", 1), ("begin_end", 2)):
        options = {"model": "bert", "from_scratch": BERT, "tokenizer": str(tmp_path), "add_special_tokens": setting}
        task = SequenceClassification(RunConfig(task=SequenceClassificationConfig(**options)))
        assert task.build_tokenizer().num_special_tokens_to_add() == special


@pytest.mark.parametrize("own", [False, True])
def test_a_sequence_length_that_special_tokens_fill_is_refused(own: bool, bert_folder: Path) -> None:
    tokenizer = TOKENIZER if own else load_tokenizer(str(bert_folder))
    task = task_of(["x"], tokenizer, sequence_length=3, text_pair_column="pair")
    with pytest.raises(UserError, match=r"take 3 of 3 tokens[\s\S]*data.sequence_length=4"):
        task.encode({"text": "a road", "pair": "good", "label": "x"}, True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "config.yaml").write_text(CONFIG)
    texts = [f"{'good' if number % 2 else 'bad'} road {number}" for number in range(24)]
    write(folder / "train.jsonl", [{"text": text, "label": text.startswith("good")} for text in texts])
    return folder


def predictions(run: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, (run / "eval" / "validation" / "predictions.jsonl").read_text().splitlines())


def test_a_run_keeps_its_labels(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = project / "runs" / "tiny"
    fit_in(project, "eval.metric=accuracy", "eval.mode=max")
    assert json.loads((run / "task.json").read_text()) == {"labels": [False, True]}
    found = list(predictions(run))
    assert all(type(record["prediction"]) is bool for record in found)
    right = sum(record["prediction"] is record["label"] for record in found)
    scores = json.loads((run / "eval" / "validation" / "scores.json").read_text())
    assert scores["accuracy"] == right / 24
    assert right > 20
    # labels of other data do not become those of this run
    write(project / "other.jsonl", [{"text": "good road", "label": True}] * 3)
    monkeypatch.chdir(project)
    loaded = drawbar.load_config("config.yaml", ["data.validation=other.jsonl", "data.train=other.jsonl"])
    assert evaluate_run(loaded.config, None, "validation", "latest")["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("problem", "labels", "metric"),
    [("multi_label", [["a"], ["b", "a"], []], "f1_micro"), ("regression", [0.5, 2, -1], "pearson")],
)
def test_runs_of_other_problems(problem: str, labels: list[Any], metric: str, project: Path) -> None:
    records = [{"text": f"{'abc'[number % 3]} road", "label": labels[number % 3]} for number in range(24)]
    write(project / f"{problem}.jsonl", records)
    splits = [f"data.{split}={problem}.jsonl" for split in ("train", "validation")]
    run = project / "runs" / problem
    settings = (f"run.name={problem}", f"task.problem={problem}", f"eval.metric={metric}", "eval.mode=max")
    fit_in(project, *settings, *splits, "train.steps=60")
    assert json.loads((run / "eval" / "validation" / "scores.json").read_text())[metric] > 0.9
    if problem == "multi_label":
        assert all(type(record["prediction"]) is list for record in predictions(run))
    else:
        assert all(type(record["prediction"]) is float for record in predictions(run))


def test_bad_records_are_named_or_counted(project: Path) -> None:
    good = [{"text": "a road", "label": number % 2} for number in range(8)]
    bad = [{"text": "a road"}, {"text": 3, "label": 1}, {"text": "a road", "label": [1]}]
    write(project / "bad.jsonl", [*good, *bad])
    settings = ("run.name=bad", "data.train=bad.jsonl", "train.steps=1")
    with pytest.raises(UserError) as refused:
        fit_in(project, *settings)
    assert "bad.jsonl:9" in str(refused.value.where) or "bad.jsonl:10" in str(refused.value.where)
    assert not (project / "runs" / "bad").exists()
    fit_in(project, *settings, "data.on_bad_record=skip", "data.validation=null")
    log = (project / "runs" / "bad" / "logs" / "rank-0000.log").read_text()
    assert "3 bad" in log
    assert "bad.jsonl:11" in log


def test_the_numbers_of_a_regression_have_all_digits_in_bf16() -> None:
    torch.manual_seed(0)
    task = task_of(problem="regression")
    samples = encoded(task, [{"text": "a road" * number, "label": 0} for number in range(1, 9)])
    model = task.build_model().eval()
    batch = task.collate([samples[number] for number in range(8)])
    expected = task.predict(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = task.predict(model, batch)
    assert found == pytest.approx(expected, abs=0.02)
    assert any(torch.tensor(number).bfloat16().item() != number for number in found)
