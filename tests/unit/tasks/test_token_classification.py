"""token_classification: the first token of each word has its label, and a prediction has a label for each word."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertTokenizerFast, PreTrainedTokenizerBase, RobertaTokenizerFast

from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import TokenClassificationConfig
from drawbar.data.dataset import encode_records
from drawbar.data.tokenizer import prefix_space, train_byte_bpe, wrap_texts
from drawbar.errors import UserError
from drawbar.evaluation.scoring import with_prediction
from drawbar.tasks.classification import TokenClassification
from drawbar.tasks.task_context import TaskContext
from runs import fit_in

TOKENIZER = wrap_texts(prefix_space(train_byte_bpe(["the load and the engine"] * 9, 280)), "begin_end")
WORD_PIECES = BertTokenizerFast(
    vocab={
        word: number
        for number, word in enumerate(
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "load", "##s", "##y", "a", "?"]
        )
    }
)
NUL = chr(0)  # of which BERT's tokenizer leaves nothing
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
  type: token_classification
  model: bert
  from_scratch: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2,
                 max_position_embeddings: 64}
  tokenizer: {train: byte_bpe, vocab_size: 280}
data: {train: train.jsonl, validation: train.jsonl, sequence_length: 32}
train: {global_batch: 8, steps: 40}
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
) -> TokenClassification:
    config = TokenClassificationConfig(model="bert", from_scratch=BERT, **options)
    run_config = RunConfig(task=config, data=DataSection(sequence_length=sequence_length))
    return TokenClassification(TaskContext(run_config, tokenizer, {"labels": labels or ["O", "B-X", "I-X"]}))


def targets(task: TokenClassification, words: list[str], tags: list[Any]) -> list[tuple[str, int]]:
    """Tokens of a record with their labels."""
    sample = task.encode({"tokens": words, "tags": tags}, True)
    assert sample is not None
    return list(zip(task.tokenizer.convert_ids_to_tokens(sample["input_ids"]), sample["labels"], strict=True))


def test_the_first_token_of_a_word_has_its_label() -> None:
    found = targets(task_of(tokenizer=WORD_PIECES), ["the", "loadsy", "a"], ["O", "B-X", "I-X"])
    assert found == [("[CLS]", -100), ("the", 0), ("load", 1), ("##s", -100), ("##y", -100), ("a", 2), ("[SEP]", -100)]


def test_words_of_a_byte_level_tokenizer_keep_their_spaces() -> None:
    """As in the texts that it was trained on: else it would write words in pieces."""
    found = targets(task_of(), ["the", "load", "and", "xq"], ["O", "B-X", "I-X", "O"])
    end = TOKENIZER.eos_token
    assert [token for token, _ in found] == [end, *TOKENIZER.tokenize("the load and xq"), end]
    firsts = [TOKENIZER.tokenize(word)[0] for word in ("the", "load", "and", "xq")]
    assert [pair for pair in found if pair[1] != -100] == list(zip(firsts, [0, 1, 2, 0], strict=True))


def test_a_pretrained_byte_level_tokenizer_too() -> None:
    state = json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]
    special = {word: len(state["vocab"]) + number for number, word in enumerate(["<s>", "</s>", "<pad>", "<unk>"])}
    roberta = RobertaTokenizerFast(vocab={**state["vocab"], **special}, merges=[tuple(m) for m in state["merges"]])
    words = ["the", "load", "and", "the", "engine"]
    found = targets(task_of(tokenizer=roberta), words, ["O", "B-X", "I-X", "O", "O"])
    assert [token for token, _ in found] == ["<s>", *roberta.tokenize(" ".join(words)), "</s>"]


WORDS = st.lists(st.text(max_size=8), min_size=1, max_size=12)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WORD_PIECES], ids=["byte_bpe", "word_pieces"])
@given(words=WORDS, data=st.data())
def test_each_word_is_a_target_once(tokenizer: PreTrainedTokenizerBase, words: list[str], data: st.DataObject) -> None:
    """In order, whatever it is made of, but nothing; a record that is cut loses words at its end."""
    tags = data.draw(st.lists(st.sampled_from(["O", "B-X", "I-X"]), min_size=len(words), max_size=len(words)))
    pairs = zip(words, tags, strict=True)
    expected = [["O", "B-X", "I-X"].index(tag) for word, tag in pairs if tokenizer.tokenize(word)]
    found = [label for _, label in targets(task_of(tokenizer=tokenizer, sequence_length=500), words, tags)]
    assert [label for label in found if label != -100] == expected
    assert found[0] == found[-1] == -100
    length = data.draw(st.integers(3, 12))
    sample = task_of(tokenizer=tokenizer, sequence_length=length).encode({"tokens": words, "tags": tags}, True)
    assert sample is not None
    assert sample.get("truncated", False) is (len(found) > length)
    assert len(sample["input_ids"]) == len(sample["labels"]) == min(length, len(found))
    kept = [label for label in sample["labels"] if label != -100]
    assert kept == expected[: len(kept)]
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    assert sample["input_ids"][-1] == end


def test_a_word_without_tokens_is_no_target_and_not_seen() -> None:
    """As where an exported model is used."""
    assert WORD_PIECES.tokenize(NUL) == []
    found = targets(task_of(tokenizer=WORD_PIECES), ["the", NUL, "a", NUL], ["O", "B-X", "I-X", "O"])
    assert found == [("[CLS]", -100), ("the", 0), ("a", 2), ("[SEP]", -100)]
    assert [label for _, label in targets(task_of(tokenizer=WORD_PIECES), [NUL], ["O"])] == [-100, -100]


@pytest.mark.parametrize(
    ("words", "prediction", "complete"),
    [
        (["the", NUL, "a", NUL], ["B-X", "I-X"], ["B-X", "O", "I-X", "O"]),
        ([NUL, "the"], ["B-X"], ["O", "B-X"]),
        (["the", NUL, "load", "a", NUL], ["B-X", "I-X"], ["B-X", "O", "I-X"]),  # "a" was cut off
        ([NUL, NUL], [], ["O", "O"]),
        (["the", "a"], ["B-X", "I-X"], ["B-X", "I-X"]),
        (["the", "a"], ["B-X"], ["B-X"]),
    ],
)
def test_a_prediction_is_for_every_word(words: list[str], prediction: list[str], complete: list[str]) -> None:
    task = task_of(tokenizer=WORD_PIECES)
    record = {"tokens": words}
    assert task.postprocess(record, prediction) == complete
    assert with_prediction(task, 7, record, {7: prediction}) == {"id": 7, **record, "prediction": complete}  # as scored


class OwnWords(TokenClassification):
    def encode(self, record: dict[str, Any], train: bool) -> Any:
        return super().encode({"tokens": record["text"].split(), "tags": record["labels"]}, train)


def test_a_users_own_words_are_left_to_the_user() -> None:
    assert OwnWords(task_of().run_config).postprocess({"text": "a b c"}, ["B-X"]) == ["B-X"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"tokens": ["the", "load"], "tags": ["O"]}, "2 words and 1 labels"),
        ({"tokens": ["the"], "tags": ["B-Y"]}, "'B-Y' is none of the task's: O, B-X, I-X"),
        ({"tokens": ["the"], "tags": [None]}, "which is no label"),
        ({"tokens": "the", "tags": ["O"]}, "'tokens' is str, not list"),
        ({"tokens": ["the", 12], "tags": ["O", "O"]}, "word 2 in 'tokens' is int, not text: '12'"),
        ({"tokens": [None], "tags": ["O"]}, "word 1 in 'tokens' is NoneType"),
        ({"tokens": ["the"], "tags": "O"}, "'tags' is str, not list"),
        ({"tokens": ["the"]}, "no 'tags'"),
        ({"tags": ["O"]}, "no 'tokens'"),
    ],
)
def test_a_bad_record_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_of().encode(record, True)


def test_a_record_without_words_is_dropped() -> None:
    assert task_of().encode({"tokens": [], "tags": []}, True) is None


@pytest.mark.parametrize("has_labels", [True, False])
def test_predictions_have_a_label_for_each_word(has_labels: bool) -> None:
    """Of words that are cut off, none; also where the records have no labels."""
    torch.manual_seed(0)
    task = task_of([3, 7, 11], sequence_length=10)
    task.has_labels = has_labels
    words = [["the"], ["the", "load", "and"], ["and", "the", "load", "xyz"] * 5]
    records = [{"tokens": one, **({"tags": [3] * len(one)} if has_labels else {})} for one in words]
    samples = encode_records(records, lambda record: task.encode(record, True), describe=str)
    assert samples.truncated == 1
    model = task.build_model().eval()
    together = task.predict(model, task.collate([samples[number] for number in range(3)]))
    assert [len(one) for one in together[:2]] == [1, 3]
    assert 0 < len(together[2]) < 10
    assert {label for one in together for label in one} <= {3, 7, 11}
    assert together == [task.predict(model, task.collate([samples[number]]))[0] for number in range(3)]


@pytest.mark.parametrize(
    ("labels", "metric"),
    [
        (["O", "B-PER", "I-PER"], "entity_f1"),
        (["NOUN", "VERB"], "tag_accuracy"),
        ([0, 1, 2], "tag_accuracy"),
        (["O", "B-PER", "X"], "tag_accuracy"),
    ],
)
def test_usual_metrics(labels: list[Any], metric: str) -> None:
    task = task_of(labels)
    record = {"tokens": ["a", "b"], "tags": labels[:2], "prediction": labels[:2]}
    assert task.score([record])[metric] == 1.0
    assert list(task.metrics) == [metric]


def test_labels_are_those_of_the_training_data(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"tokens": ["a", "b"], "tags": ["O", "B-X"]}\n{"tokens": ["a"], "tags": ["I-X"]}\n')
    config = TokenClassificationConfig(model="bert", from_scratch=BERT)
    task = TokenClassification(RunConfig(task=config, data=DataSection(train=str(path))))
    assert task.find_dataset_metadata() == {"labels": ["B-X", "I-X", "O"]}
    path.write_text(path.read_text() + '{"tokens": ["a"], "tags": []}\n')
    with pytest.raises(UserError, match=r"1 words and 0 labels[\s\S]*train.jsonl:3"):
        task.find_dataset_metadata()


def test_a_run_learns_tags(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    tag_of = {"the": "O", "load": "B-X", "engine": "I-X", "and": "O"}
    words = list(tag_of)
    sentences = [[words[(number * step) % 4] for step in range(1, 2 + number % 6)] for number in range(16)]
    lines = [json.dumps({"tokens": one, "tags": [tag_of[word] for word in one]}) for one in sentences]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    fit_in(tmp_path, "eval.metric=entity_f1", "eval.mode=max")
    results = tmp_path / "runs" / "tiny" / "eval" / "validation"
    assert json.loads((results / "scores.json").read_text())["entity_f1"] > 0.9
    found = [json.loads(line) for line in (results / "predictions.jsonl").read_text().splitlines()]
    assert [len(record["prediction"]) for record in found] == [len(one) for one in sentences]
