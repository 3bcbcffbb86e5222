"""seq2seq with the tokenizers of NLLB, mBART and M2M100, which mark each text with its language."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase
from transformers.models.m2m_100.modeling_m2m_100 import shift_tokens_right as shift_m2m100
from transformers.models.mbart.modeling_mbart import shift_tokens_right as shift_mbart

from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import Seq2SeqConfig
from drawbar.data.tokenizer import set_languages, train_byte_bpe
from drawbar.errors import UserError
from drawbar.tasks.seq2seq import Seq2Seq
from translators import LANGUAGES, PAIRS, m2m100, mbart, mbart50, nllb

M2M100 = {
    "d_model": 16,
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 1),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
    "decoder_start_token_id": 2,
}


def task_of(family: str, languages: tuple[str | None, str | None], tokenizer: str = "given", **data: Any) -> Seq2Seq:
    source, target = languages
    options = {"from_scratch": M2M100, "source_language": source, "target_language": target}
    config = Seq2SeqConfig(model=family, tokenizer=tokenizer, **options)
    return Seq2Seq(RunConfig(task=config, data=DataSection(**data)))


def check_ids(task: Seq2Seq, documented: Any, family: str) -> None:
    """Against the tokenizer's own documented use, and what the model itself makes of the labels."""
    for source, target in PAIRS:
        wanted = documented(source, text_target=target)
        sample = task.encode({"source": source, "target": target}, True)
        assert sample["input_ids"] == wanted["input_ids"]
        assert sample["labels"] == wanted["labels"]
        labels, pad = torch.tensor([wanted["labels"]]), documented.pad_token_id
        shifted = shift_mbart(labels, pad) if family == "mbart" else shift_m2m100(labels, pad, documented.eos_token_id)
        assert sample["decoder_input_ids"] == shifted[0].tolist()


@pytest.mark.parametrize(
    ("make", "family"), [(nllb, "m2m_100"), (mbart, "mbart"), (mbart50, "mbart")], ids=["nllb", "mbart", "mbart50"]
)
def test_texts_are_marked_with_their_languages(
    make: Callable[..., PreTrainedTokenizerBase], family: str, tmp_path: Path
) -> None:
    make().save_pretrained(str(tmp_path))
    source, target = LANGUAGES[make.__name__]
    task = task_of(family, (source, target), str(tmp_path))
    check_ids(task, make(src_lang=source, tgt_lang=target), family)
    assert task.tokenizer.convert_tokens_to_ids(target) in task.encode({"source": "", "target": ""}, True)["labels"]


def test_m2m100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("m2m_100", ("en", "de"))
    task.tokenizer = m2m100(tmp_path, monkeypatch)
    set_languages(task.tokenizer, "en", "de")
    check_ids(task, m2m100(tmp_path, monkeypatch, src_lang="en", tgt_lang="de"), "m2m_100")
    labels = task.encode({"source": "the load", "target": "die last"}, True)["labels"]
    assert task.tokenizer.convert_ids_to_tokens(labels) == ["__de__", "▁die", "▁last", "</s>"]


def test_what_is_cut_keeps_its_marks() -> None:
    task = task_of("mbart", LANGUAGES["mbart"], sequence_length=4)
    task.tokenizer = mbart(src_lang="en_XX", tgt_lang="de_DE")
    sample = task.encode({"source": PAIRS[0][0], "target": PAIRS[0][1]}, True)
    names = [task.tokenizer.convert_ids_to_tokens(sample[name]) for name in ("input_ids", "labels")]
    assert names == [["▁the", "▁load", "</s>", "en_XX"], ["▁die", "▁last", "</s>", "de_DE"]]
    assert sample["truncated"]


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        ((None, None), "marks texts with their languages, and does not know which"),
        (("eng_Latn", None), "does not know which"),
        ((None, "deu_Latn"), "does not know which"),
        (("eng_Latn", "deu_Lat"), r"no 'deu_Lat'; did you mean deu_Latn\?[\s\S]*task.target_language"),
        (("en", "deu_Latn"), r"no 'en'[\s\S]*task.source_language[\s\S]*eng_Latn"),
    ],
)
def test_a_tokenizer_is_told_the_languages(
    languages: tuple[str | None, str | None], message: str, tmp_path: Path
) -> None:
    nllb().save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match=message):
        task_of("m2m_100", languages, str(tmp_path)).build_tokenizer()


def test_a_tokenizer_without_languages_takes_none(tmp_path: Path) -> None:
    train_byte_bpe([], 257).save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match=r"does not mark texts[\s\S]*task.source_prefix"):
        task_of("t5", ("en", "de"), str(tmp_path)).build_tokenizer()
