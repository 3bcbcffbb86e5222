"""A run goes on with the tokenizer that it has saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertTokenizerFast, PreTrainedTokenizerBase

from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import BUILT_IN_TASKS
from drawbar.data.tokenizer import load_tokenizer, special_tokens_around, train_byte_bpe
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import Task
from drawbar.tasks.task_registry import task_class
from drawbar.train.setup import build_task, save_task

PLAIN = train_byte_bpe(["the load and the engine"] * 9, 270, {"mask_token": "<mask>"})
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
BERT = BertTokenizerFast(vocab={piece: number for number, piece in enumerate(PIECES)})


def task_in(run_dir: Path, name: str, **options: Any) -> Task:
    task = BUILT_IN_TASKS[name](type=name, model="llama", **{"from_scratch": {}, **options})
    config = RunConfig(task=task, data=DataSection(sequence_length=16))
    with Distributed(RankInfo(), torch.device("cpu"), timeout=60) as world:
        return build_task(task_class(name), config, world, run_dir)


@pytest.mark.parametrize("tokenizer", [PLAIN, BERT], ids=["plain", "bert"])
def test_a_tokenizer_stays_as_it_is_saved(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Whatever it puts around a text, and be it nothing."""
    tokenizer.save_pretrained(str(tmp_path / "given"))
    options = {"tokenizer": str(tmp_path / "given"), "labels": ["x", "y"]}
    task = task_in(tmp_path / "run", "sequence_classification", **options)
    (tmp_path / "run").mkdir()
    save_task(task, tmp_path / "run")
    again = task_in(tmp_path / "run", "sequence_classification", **options)
    assert special_tokens_around(again.tokenizer) == special_tokens_around(tokenizer)


def test_a_chat_template_that_is_given_since_goes_with_the_tokenizer(tmp_path: Path) -> None:
    """As the remedy of a template that does not do asks for; one that the run began with is kept, whatever its file."""
    run, own = tmp_path / "run", train_byte_bpe([], 257)
    own.chat_template = "{{ messages }} of then"
    own.save_pretrained(str(run / "tokenizer"))
    (run / "config.yaml").write_text("task: {messages_column: messages, chat_template: then.jinja}")
    kept = task_in(run, "causal_lm", messages_column="messages", chat_template="then.jinja")
    assert kept.tokenizer.chat_template == own.chat_template
    given = task_in(run, "causal_lm", messages_column="messages", chat_template="{{ messages }}")
    assert isinstance(given, PretrainedTask)
    given.tokenizer_to_export().save_pretrained(str(tmp_path / "exported"))
    assert load_tokenizer(str(tmp_path / "exported")).chat_template == "{{ messages }}"
