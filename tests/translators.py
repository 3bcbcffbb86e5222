"""Tiny tokenizers of the multilingual translation models: of the models' own classes, with a few words."""

import importlib
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from transformers import MBart50TokenizerFast, MBartTokenizerFast, NllbTokenizerFast, PreTrainedTokenizerBase

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = ["the", "load", "is", "heavy", "die", "last", "ist", "schwer"]
LETTERS = sorted(set("".join(WORDS)))
PIECES = [("▁", -2.0), *((letter, -3.0) for letter in LETTERS), *((f"▁{word}", -1.0) for word in WORDS)]
LANGUAGES = {"nllb": ("eng_Latn", "deu_Latn"), "mbart": ("en_XX", "de_DE"), "mbart50": ("en_XX", "de_DE")}
"""Source and target, as each of them calls English and German."""
PAIRS = [("the load is heavy", "die last ist schwer"), ("the load", "die last"), ("is the load", "ist die last")]


def nllb(**options: Any) -> PreTrainedTokenizerBase:
    vocabulary = [*SPECIAL, "▁", *LETTERS]
    return NllbTokenizerFast(vocab={piece: number for number, piece in enumerate(vocabulary)}, merges=[], **options)


def mbart(**options: Any) -> PreTrainedTokenizerBase:
    special = [(name, 0.0) for name in SPECIAL]
    codes = [(name, 0.0) for name in ("de_DE", "en_XX", "<mask>")]
    return MBartTokenizerFast(vocab=[*special, *PIECES, *codes], **options)


def mbart50(**options: Any) -> PreTrainedTokenizerBase:
    return MBart50TokenizerFast(vocab=[("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *PIECES], **options)


class Sentences:
    """As much of sentencepiece's processor as M2M100's tokenizer needs: words."""

    def Load(self, path: str) -> None:
        pass

    def encode(self, text: str, out_type: type) -> list[str]:
        return [f"▁{word}" for word in text.split()]


def m2m100(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> PreTrainedTokenizerBase:
    """Written in Python, on a library that need not be installed."""
    stand_in = types.ModuleType("sentencepiece")
    stand_in.SentencePieceProcessor = Sentences  # type: ignore[attr-defined]
    stand_in.__spec__ = importlib.machinery.ModuleSpec("sentencepiece", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", stand_in)
    module = "transformers.models.m2m_100.tokenization_m2m_100"
    monkeypatch.delitem(sys.modules, module, raising=False)
    vocabulary = [*SPECIAL, *(f"▁{word}" for word in WORDS)]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(vocabulary)}))
    (folder / "words.model").write_text("")
    files = (str(folder / "vocab.json"), str(folder / "words.model"))
    tokenizer = importlib.import_module(module).M2M100Tokenizer(*files, **options)
    monkeypatch.delitem(sys.modules, module)  # no other test may find what was made of the stand-in
    return tokenizer
