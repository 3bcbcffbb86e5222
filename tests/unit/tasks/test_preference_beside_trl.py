"""The tasks ``preference`` and ``reward`` beside TRL: equal losses, step by step, and equal weights at the end."""

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from conftest import WORDS
from drawbar.data.tokenizer import set_option, train_byte_bpe, wrap_texts
from programs import lacks
from runs import fit_in, losses

pytestmark = pytest.mark.exhaustive
STEPS, PAIRS, LR = 10, 8, 1e-3
Rows = list[dict[str, Any]]


def answer(draw: random.Random, size: int, last: str) -> str:
    return " " + " ".join([*draw.choices(WORDS, k=size), last])


def pairs(size: int | None = None) -> Rows:
    """Records of one global batch a step."""
    draw = random.Random(0)
    return [
        {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 6))),
            "chosen": answer(draw, size or draw.randint(1, 8), "well"),
            "rejected": answer(draw, draw.randint(1, 8), "badly"),
        }
        for _ in range(STEPS * PAIRS)
    ]


def judged() -> Rows:
    """One global batch: TRL pairs each answer with that before it in the batch, and drawbar in all data."""
    rows = [[one["prompt"], one["chosen"], one["rejected"]] for one in pairs()[:PAIRS]]
    good = [True, False, False, True, True, True, False, True]
    return [
        {"prompt": prompt, "completion": chosen if is_good else rejected, "label": is_good}
        for (prompt, chosen, rejected), is_good in zip(rows, good, strict=True)
    ]


def without_prompt(rows: Rows) -> Rows:
    """ORPO in TRL also learns the prompt, and averages over the tokens of a batch: here there is none, and the better
    answers are of one length."""
    return [{**row, "prompt": "", "chosen": " the road bends around the hill"} for row in rows]


def trained_elsewhere(method: str, model: Any, tokenizer: Any, rows: Rows, folder: Path) -> tuple[list[float], Any]:
    """The losses and the model of TRL's trainer for this method."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "dpo": (DPOTrainer, DPOConfig, {"max_length": 64}),
        "ipo": (DPOTrainer, DPOConfig, {"loss_type": "ipo", "max_length": 64}),
        "kto": (KTOTrainer, KTOConfig, {"desirable_weight": 1.5, "max_length": 64}),
        "orpo": (ORPOTrainer, ORPOConfig, {"max_length": 64}),
        "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0, "max_length": 64}),
        "reward": (RewardTrainer, RewardConfig, {"max_length": 64}),
    }
    trainer_type, config_type, options = kinds[method]
    config = config_type(
        output_dir=str(folder),
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        logging_steps=1,
        logging_first_step=True,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        **options,
    )
    trainer = trainer_type(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], trainer.model


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = train_byte_bpe([" ".join(WORDS)], 280, {"pad_token": "<|pad|>"})
    wrap_texts(made, "begin")
    set_option(made, "split_special_tokens", False)  # TRL writes the end token into the text
    return made


@pytest.mark.parametrize(
    ("method", "rows", "settings"),
    [
        ("dpo", pairs, ()),
        ("ipo", pairs, ("task.method=ipo",)),
        ("kto", judged, ("task.method=kto", "task.desirable_weight=1.5")),
        ("orpo", lambda: without_prompt(pairs()), ("task.method=orpo",)),
        ("simpo", pairs, ("task.method=simpo",)),
        ("reward", pairs, ("task.type=reward",)),
    ],
)
def test_losses_and_weights(
    method: str,
    rows: Callable[[], Rows],
    settings: tuple[str, ...],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("trl") is None:
        lacks("no trl here: make .venv/installed-others")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id, max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    auto = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    found = rows()
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    (tmp_path / "config.yaml").write_text(
        "run: {name: here}\n"
        "task: {type: preference, model: model}\n"
        "data: {train: train.jsonl, sequence_length: 64, shuffle: false, batching: padded}\n"
        f"train: {{global_batch: {PAIRS}, micro_batch: 2, steps: {STEPS}}}\n"
        f"optim: {{lr: {LR}, weight_decay: 0, schedule: constant}}\n"
        "precision: fp32\ndevice: cpu\ntracking: {log_every: 1, tensorboard: false}\n",
        encoding="utf-8",
    )
    fit_in(tmp_path, *settings)
    here = losses(tmp_path / "runs" / "here")
    model = auto.from_pretrained(tmp_path / "model")
    there, trained = trained_elsewhere(
        method, model, AutoTokenizer.from_pretrained(tmp_path / "model"), found, tmp_path
    )
    assert list(here.values()) == pytest.approx(there, abs=1e-5)
    step = tmp_path / "runs" / "here" / "checkpoints" / f"step-{STEPS:08d}"
    ours = load_file(step / "model-00000.safetensors")
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
