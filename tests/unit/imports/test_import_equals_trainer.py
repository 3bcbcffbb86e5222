"""An imported configuration of transformers' Trainer trains as the Trainer does with the same file."""

import json
import random
from contextlib import chdir
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from drawbar.cli import group
from runs import fit_in, largest_difference, losses

BLOCK = 16
FILE = f"""\
model_name_or_path: tiny
train_file: train.jsonl
validation_file: train.jsonl
block_size: {BLOCK}
output_dir: out/ours
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 8
learning_rate: 1.0e-2
lr_scheduler_type: SCHEDULE
warmup_steps: 0.25
weight_decay: 0.1
adam_beta2: 0.95
max_grad_norm: 0.5
logging_steps: 1
save_strategy: "no"
report_to: none
seed: 5
use_cpu: true
train_sampling_strategy: sequential
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A tiny Llama, whose tokenizer ends each text, and texts of one block, which run_clm joins and cuts again."""
    words = [f"w{number}" for number in range(40)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **sizes)
    config.bos_token_id = None
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    draw = random.Random(0)
    starts = draw.choices(range(40), k=40)
    texts = [" ".join((words + words)[first:][: BLOCK - 1]) for first in starts]  # in order, to be learned
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def theirs(path: Path) -> dict[int, float]:
    """The losses of the Trainer with the arguments of the file, and samples as run_clm makes them."""
    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path), allow_extra_keys=True)
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    texts = [json.loads(line)["text"] for line in Path("train.jsonl").read_text(encoding="utf-8").splitlines()]
    joined = list(chain.from_iterable(tokenizer(texts).input_ids))
    rows = [joined[first : first + BLOCK] for first in range(0, len(joined), BLOCK)]
    samples: Any = [{"input_ids": row, "labels": row} for row in rows]
    model = AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32)
    trainer = Trainer(model, arguments, train_dataset=samples, data_collator=default_data_collator)
    trainer.train()
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.mark.parametrize("schedule", ["cosine", "constant_with_warmup"])
def test_the_losses_are_those_of_the_trainer(schedule: str, job: Path) -> None:
    (job / "trainer.yaml").write_text(FILE.replace("SCHEDULE", schedule), encoding="utf-8")
    with chdir(job):
        CliRunner().invoke(group, ["import", "trainer.yaml", "--out", "config.yaml"], catch_exceptions=False)
        expected = theirs(job / "trainer.yaml")
        fit_in(job)
    found = losses(job / "out" / "ours")
    assert len(found) == 8
    assert found[8] < found[1]  # it has learned
    assert largest_difference(expected, found) < 1e-5
