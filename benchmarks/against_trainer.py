"""Language modelling with drawbar and with transformers' Trainer, from the same weights on the same blocks in the same
order: how far apart are the losses?

    python benchmarks/against_trainer.py --train TEXT --validation TEXT

A small GPT-2 without dropout, fp32, AdamW, warm-up and linear decay, clipping at 1. Prints a table, writes JSON.
"""

import argparse
import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import drawbar
from drawbar.data.packing import IGNORED_LABEL
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.runtime.seed import seed_everything
from drawbar.tracking.console import make_console
from drawbar.tracking.table import print_table
from drawbar.train.batches import load_split, make_loader
from drawbar.train.setup import build_task
from training import machine

GPT2 = {
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/against_trainer.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(options.train, options.validation, options.steps, Path(folder), GPT2, length=128, batch=16)
    report = {"date": date.today().isoformat(), "machine": machine("cpu"), "steps": options.steps, **found}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    rows = [[name, f"{found['drawbar'][name]:.6f}", f"{found['transformers'][name]:.6f}"] for name in found["drawbar"]]
    print_table(f"GPT-2 after {options.steps} steps", ["loss", "drawbar", "transformers"], rows)


def compare(
    train: Path, validation: Path, steps: int, folder: Path, model: dict[str, Any], length: int, batch: int
) -> dict[str, Any]:
    """The last training loss and the validation loss of both."""
    settings = [
        "task.model=gpt2",
        f"task.from_scratch={json.dumps(model)}",
        "task.tokenizer={train: byte_bpe, vocab_size: 2048}",
        f"data.train={train}",
        f"data.validation={validation}",
        f"data.sequence_length={length}",
        f"train.global_batch={batch}",
        f"train.steps={steps}",
        "optim={lr: 1e-3, weight_decay: 0.1, warmup: 5, schedule: linear}",
        "precision=fp32",
        "device=cpu",
        "checkpoint.every=null",
        "tracking.log_every=1",
        f"run.dir={folder}",
        "run.name=drawbar",
    ]
    config = drawbar.load_config(None, settings).config
    drawbar.Trainer(config).fit()
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    ours = {
        "training": next(line["train/loss"] for line in reversed(lines) if "train/loss" in line),
        "validation": lines[-1]["eval/validation/loss"],
    }
    return {"drawbar": ours, "transformers": train_transformers(config, folder / "transformers")}


class Blocks(Dataset):
    """drawbar's samples in the order in which drawbar visits them."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train_transformers(config: Any, folder: Path) -> dict[str, float]:
    """transformers' Trainer on what drawbar's loader gives, step by step."""
    world = Distributed(RankInfo(), torch.device("cpu"), timeout=60)
    seed_everything(config.run.seed)
    task = build_task(drawbar.CausalLM, config, world, config.run_dir)
    loader: Any = make_loader(task, config, world, make_console(False))
    model = task.build_model()  # the same random numbers as in drawbar's run
    steps, size, samples = config.train.steps, config.train.global_batch, []
    order = [loader.sampler.rows(epoch, torch.arange(loader.sampler.size).numpy()) for epoch in range(99)]
    for rows in order:
        whole = len(rows) // size * size
        if whole != len(rows) and len(samples) + len(rows) < steps * size:
            raise SystemExit("choose fewer steps: transformers does not end an epoch with a smaller batch here")
        samples += [loader.rows.samples[row] for row in rows.tolist()]
        if len(samples) >= steps * size:
            break
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=size,
        learning_rate=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        warmup_steps=config.optim.warmup,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = InOrder(model, arguments, train_dataset=Blocks(samples), data_collator=lambda rows: collate(task, rows))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"training": losses[-1], "validation": validation_loss(task, model, config, world)}


def collate(task: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = task.collate(rows)
    # Trainer divides by all labels, though a block's first token has no prediction: let it not count that one
    labels = batch["labels"].index_fill(1, torch.tensor([0]), IGNORED_LABEL)
    return {"input_ids": batch["input_ids"], "labels": labels}


@torch.no_grad()
def validation_loss(task: Any, model: Any, config: Any, world: Distributed) -> float:
    """Loss a token over the validation samples, one at a time."""
    samples = load_split(task, "validation", config, world, make_console(False)).samples
    model.eval()
    total, count = 0.0, 0
    for number in range(len(samples)):
        tokens = torch.tensor(samples[number]["input_ids"]).long()[None]
        logits = model(tokens).logits[0, :-1]
        total += float(functional.cross_entropy(logits, tokens[0, 1:], ignore_index=IGNORED_LABEL, reduction="sum"))
        count += len(tokens[0]) - 1
    return total / count


if __name__ == "__main__":
    main()
