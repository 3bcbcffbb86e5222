"""``drawbar prepare --show``: rows as the model gets them, and what it learns of them."""

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from test_prepare import IMAGES

from drawbar.commands.prepare_data import prepare_run
from drawbar.config.io.load_config import load_config

LLAMA = "model: llama, from_scratch: {}"
BERT = "model: bert, from_scratch: {}"
TOKENIZER = "tokenizer: {train: byte_bpe, vocab_size: 257}"
CHATML = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
END = "<|endoftext|>"


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def show(task: str, records: list[dict[str, Any]], *settings: str, rows: int = 1) -> list[str]:
        """The lines after the legend."""
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / "config.yaml").write_text(
            f"task: {{{task}}}\ndata: {{train: train.jsonl, shuffle: false}}\ntrain: {{steps: 1}}\ndevice: cpu\n"
        )
        with chdir(tmp_path):
            prepare_run(load_config("config.yaml", settings).config, None, rows)
        return capsys.readouterr().out.partition("⟦learned⟧, only read\n")[2].strip().splitlines()[:-1]

    return show


def test_a_chat_shows_its_answers_and_whether_the_end_is_learned(shown: Any) -> None:
    task = f"{LLAMA}, {TOKENIZER}, messages_column: messages, chat_template: {json.dumps(CHATML)}"
    whole = shown(task, [{"messages": CHAT}])
    assert whole == [
        "row 1",
        f"sample 0, train.jsonl:1: 23 tokens, 2 learned, learns to end with {END}",
        f"<user>2+2?<assistant>⟦4{END}⟧",
    ]
    cut = shown(task, [{"messages": CHAT}], "data.sequence_length=22")
    assert cut[1:] == [
        "sample 0, train.jsonl:1: 22 tokens, 1 learned, truncated at data.sequence_length, learns no end token",
        "<user>2+2?<assistant>⟦4⟧",
    ]


def test_a_packed_row_shows_its_samples_and_a_text_obeys_nothing(shown: Any) -> None:
    records = [{"text": "a\nb"}, {"text": "c\x1b[31m"}]
    assert shown(f"{LLAMA}, {TOKENIZER}", records, "data.batching=packed", "data.sequence_length=16") == [
        "row 1: 2 samples, 13 of 16 tokens",
        f"sample 0, train.jsonl:1: 5 tokens, 4 learned, learns to end with {END}",
        f"{END}⟦a↵",
        f"b{END}⟧",
        f"sample 1, train.jsonl:2: 8 tokens, 7 learned, learns to end with {END}",
        f"{END}⟦c\\x1b[31m{END}⟧",
    ]


def test_labels_stand_behind_what_they_are_of(shown: Any) -> None:
    words = {"tokens": ["Ada", "is"], "tags": ["B-PER", "O"]}
    tagged = shown(f"type: token_classification, {BERT}, {TOKENIZER}", [words])
    assert tagged[-1] == f"{END}⟦ →B-PER⟧Ada⟦ →O⟧is{END}"
    text = {"text": "[good]", "label": "yes"}
    assert shown(f"type: sequence_classification, {BERT}, {TOKENIZER}, labels: [no, yes]", [text])[1:] == [
        "sample 0, train.jsonl:1: 8 tokens, 1 learned",
        f"{END}[good]{END}",
        "→ yes",
    ]
    pair = shown(f"type: seq2seq, model: t5, from_scratch: {{}}, {TOKENIZER}", [{"source": "one", "target": "eins"}])
    assert pair[-2:] == [f"source: one{END}", f"target: ⟦eins{END}⟧"]


LETTERS = """
import numpy as np
import drawbar

class Letters(drawbar.Task):
    def encode(self, record, train):
        letters = np.frombuffer(record["text"].encode(), dtype=np.uint8).astype(np.int32)
        return {"input_ids": letters, "labels": np.array([1, 2])}
"""


def test_tokens_of_no_tokenizer_are_numbers(shown: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "letters_shown.py").write_text(LETTERS)
    monkeypatch.syspath_prepend(tmp_path)
    lines = shown("type: 'letters_shown:Letters'", [{"text": "ab"}, {"text": "cd"}])
    assert lines[1:4] == ["sample 0, train.jsonl:1", "  input_ids: [2] [97, 98]", "  labels: [2] [1, 2]"]


def test_samples_without_tokens_show_their_fields(shown: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images_shown.py").write_text(IMAGES)
    monkeypatch.syspath_prepend(tmp_path)
    lines = shown("type: 'images_shown:Images'", [{}])
    assert lines[1] == "sample 0, record 0"
    assert "  pixels: [4, 4] [[0.0, 0.0, 0.0, 0.0]" in lines[2]
    assert "  labels: 0" in lines
