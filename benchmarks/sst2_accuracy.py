"""Fine-tune a sentence encoder on SST-2 with drawbar and with transformers' Trainer: the same settings, side by side.

    python -m benchmarks.sst2_accuracy --data SST2_FOLDER --model MODEL_FOLDER

The data folder holds train.tsv, dev.tsv and test.tsv (``sentence<TAB>label``, no header). One epoch, batches of 32 of
similar length, lr 5e-5 with linear decay, AdamW without weight decay, clipping at 1, bf16. Seeds take turns. The dev
accuracy after training is compared; test labels are read once, when all training is done. Prints a table, writes JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

import drawbar
from benchmarks.common.report import write_answer
from drawbar.commands.score_run import evaluate_run
from drawbar.tracking.table import print_table

LENGTH, BATCH, LR = 128, 32, 5e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit", type=int, help="training sentences (default: all)")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/sst2_accuracy.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = compare(options.data, options.model, options.seeds, options.limit, Path(folder))
    write_answer(options.json, limit=options.limit, results=results)
    rows = [
        [str(r["seed"]), r["system"], f"{r['dev']:.4f}", f"{r['test']:.4f}", f"{r['seconds']:.0f} s"] for r in results
    ]
    for system in ("drawbar", "transformers"):
        mine = [r for r in results if r["system"] == system]
        means = [statistics.mean(r[split] for r in mine) for split in ("dev", "test")]
        rows.append(["mean", system, *(f"{mean:.4f}" for mean in means), ""])
    print_table("SST-2 accuracy after one epoch", ["seed", "system", "dev", "test", "training"], rows)


def compare(data: Path, model: Path, seeds: list[int], limit: int | None, folder: Path) -> list[dict[str, Any]]:
    """Train with each seed and each system; then, and only then, read the test labels."""
    results, tests = [], []
    for seed in seeds:
        for system, train in (("drawbar", train_drawbar), ("transformers", train_transformers)):
            start = time.perf_counter()
            dev, test = train(data, model, seed, limit, folder / f"{system}-{seed}")
            results.append({"seed": seed, "system": system, "dev": dev, "seconds": time.perf_counter() - start})
            tests.append(test)
            print(f"seed {seed}, {system}: dev {dev:.4f}", flush=True)
    for result, test in zip(results, tests, strict=True):
        result["test"] = test()
    return results


def train_drawbar(data: Path, model: Path, seed: int, limit: int | None, folder: Path) -> tuple[float, Any]:
    """Dev accuracy, and how to get that of the test."""
    settings = [
        "task.type=sequence_classification",
        f"task.model={model}",
        "task.text_column=sentence",
        "task.labels=[0, 1]",
        *(f"data.{split}={data / name}.tsv" for split, name in SPLITS.items()),
        "data.columns=[sentence, label]",
        f"data.limit.train={limit or 'null'}",
        f"data.sequence_length={LENGTH}",
        "data.batching=grouped",
        f"train.global_batch={BATCH}",
        "train.epochs=1.0",
        f"optim.lr={LR}",
        "optim.weight_decay=0.0",
        "precision=bf16",
        "device=cpu",
        "checkpoint.every=null",
        "tracking.log_every=200",
        f"run.dir={folder.parent}",
        f"run.name={folder.name}",
        f"run.seed={seed}",
    ]
    config = drawbar.load_config(None, settings).config
    drawbar.Trainer(config).fit()
    scores = json.loads((config.run_dir / "eval" / "validation" / "scores.json").read_text())
    return scores["accuracy"], lambda: evaluate_run(config, None, "test", "latest")["accuracy"]


SPLITS = {"train": "train", "validation": "dev", "test": "test"}


class Sentences(Dataset):
    """A TSV file, tokenized."""

    def __init__(self, path: Path, tokenizer: Any, limit: int | None = None) -> None:
        lines = path.read_text(encoding="utf-8").splitlines()[:limit]
        pairs = [line.split("\t") for line in lines]
        self.items = [
            {**tokenizer(sentence, truncation=True, max_length=LENGTH), "labels": int(label)}
            for sentence, label in pairs
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def train_transformers(data: Path, model: Path, seed: int, limit: int | None, folder: Path) -> tuple[float, Any]:
    """The same by transformers' Trainer."""
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(model, num_labels=2),
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=64,
            learning_rate=LR,
            lr_scheduler_type="linear",
            max_grad_norm=1.0,
            weight_decay=0.0,
            bf16=True,
            use_cpu=True,
            train_sampling_strategy="group_by_length",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=Sentences(data / "train.tsv", tokenizer, limit),
        eval_dataset=Sentences(data / "dev.tsv", tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.train()
    return trainer.evaluate()["eval_accuracy"], lambda: trainer.evaluate(Sentences(data / "test.tsv", tokenizer))[
        "eval_accuracy"
    ]


if __name__ == "__main__":
    main()
