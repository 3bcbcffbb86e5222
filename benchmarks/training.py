"""`make bench`: what drawbar costs over the same loop written by hand.

Both train the same Llama on the same micro-batches in the same number format. They take turns, step for step, so that a
machine that slows down slows both; the ratio of each pair is taken, and its median. Prints a table, writes JSON.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import nn

import drawbar
from drawbar.data.loader import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.engines.build import build_engine
from drawbar.parallel.precision import autocast, choose_precision
from drawbar.tracking.table import print_table

OVERRIDES = [
    "task.model=llama",
    "task.from_scratch={hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, num_attention_heads: 4,"
    " max_position_embeddings: 256, tie_word_embeddings: true}",
    "task.tokenizer={train: byte_bpe, vocab_size: 4096}",
    "data.train=python_stdlib",
    "data.sequence_length=256",
    "train.steps=1000000",
    "optim.lr=1e-3",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="steps of each, in turn (at least 5)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/training.json"))
    options = parser.parse_args()
    if options.pairs < 5:
        parser.error("--pairs must be at least 5")
    results = [
        measure(options.device, precision, micro, parts, options.pairs)
        for precision in ("fp32", "bf16")
        for micro, parts in ((8, 1), (2, 4))
    ]
    rows = [
        [r["precision"], f"{r['micro_batches']} × {r['rows']}", f"{r['tokens_per_second']:,.0f}", f"{r['ratio']:.3f}"]
        for r in results
    ]
    columns = ["precision", "micro-batches × rows", "drawbar tok/s", "drawbar ÷ by hand (time)"]
    print_table("One optimizer step of a 4 M-parameter Llama, 256 tokens a row", columns, rows)
    report = {"date": date.today().isoformat(), "machine": machine(options.device), "results": results}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {options.json}")


def measure(device: str, precision: str, rows: int, micro_batches: int, pairs: int) -> dict[str, float | str]:
    """Medians over ``pairs`` of (drawbar's step, the same step by hand)."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [*OVERRIDES, f"run.dir={folder}", f"device={device}", f"precision={precision}"]
        config = drawbar.load_config(None, settings).config
    world = Distributed(RankInfo(), choose_device(config.device, RankInfo()), timeout=60)
    task = drawbar.CausalLM(config)
    task.tokenizer = Tokens(4096)
    engine = build_engine(task, config, world, total_steps=1_000_000)
    generator = torch.Generator().manual_seed(0)
    batches = [
        drawbar.Batch({"input_ids": ids, "labels": ids}, ids=list(range(rows)))
        for ids in (torch.randint(4096, (rows, 256), generator=generator) for _ in range(micro_batches))
    ]
    by_hand = make_step_by_hand(task, precision, world.device, batches)
    micros = [MicroBatch(batch) for batch in batches]
    ours, theirs = [], []
    for pair in range(pairs + 2):  # the first two pairs warm up
        first = timed(lambda: engine.train_step(micros), world.device)
        second = timed(by_hand, world.device)
        if pair >= 2:
            ours.append(first)
            theirs.append(second)
    tokens = micro_batches * rows * 255
    return {
        "precision": precision,
        "rows": rows,
        "micro_batches": micro_batches,
        "pairs": pairs,
        "tokens_per_second": tokens / statistics.median(ours),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }


class Tokens:
    """As much of a tokenizer as building a model asks for."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def make_step_by_hand(
    task: drawbar.Task, precision: str, device: torch.device, batches: list[drawbar.Batch]
) -> Callable[[], None]:
    """The loop that people write: forward, loss, backward, clip, step."""
    model = task.build_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    count = sum((batch["labels"][:, 1:] != -100).sum().item() for batch in batches)
    chosen = choose_precision(precision, device)

    def step() -> None:
        for batch in batches:
            ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
            with autocast(chosen, device):
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
                )
            (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the GPU's work included."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def machine(device: str) -> dict[str, str]:
    chosen = choose_device(device, RankInfo())
    processor = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else processor
    return {
        "device": f"{chosen.type}: {name}",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "drawbar": drawbar.__version__,
    }


if __name__ == "__main__":
    main()
