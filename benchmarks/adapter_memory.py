"""What `drawbar plan` forecasts for adapters on a random model of half a billion parameters, beside what the process
takes as Linux counts it: `python -m benchmarks.adapter_memory`. It needs 2 GB of disk, and 4 GB of memory."""

import argparse
import ctypes
import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.plan_accuracy import HOST, sizes, write_data
from drawbar.config.io.load_config import load_config
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import assemble_engine
from drawbar.plan.machine import Machine
from drawbar.plan.rank_forecast import forecast_rank, rows_and_count, worst_micro_batch
from drawbar.plan.run_forecast import Forecaster, in_own_process
from drawbar.tasks.task_registry import task_class
from drawbar.tasks.user_methods import make_task

QWEN2 = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
"""Qwen2-0.5B: 494 million parameters, 358 million of them in linear layers."""
SMALL = {**QWEN2, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
SETTINGS = ("train.steps=3", "train.global_batch=2", "train.micro_batch=1", "data.sequence_length=256", "device=cpu",
            "precision=fp32", "parallel.strategy=single", "lora={rank: 16, modules: linear}")  # fmt: skip
BASES = ("lora.base=fp32", "lora.base=bf16", "lora.base=int8", "lora.base=nf4", "lora.base=nf4 lora.dora=true",
         "lora.base=nf4 optim.state_dtype=int8")  # fmt: skip


def configure(folder: Path, model: str, settings: str) -> RunConfig:
    task = {"type": "causal_lm", "model": str(folder / model), "tokenizer": {"train": "byte_bpe", "vocab_size": 300}}
    data = (f"data.train={folder}/text.jsonl", f"run.dir={folder}/runs", f"task={json.dumps(task)}")
    return load_config(None, [*SETTINGS, *data, *settings.split()]).config


def save_random(folder: Path) -> None:
    for name, fields in (("small", SMALL), ("qwen2", QWEN2)):
        AutoModelForCausalLM.from_config(Qwen2Config(**fields), dtype=torch.bfloat16).save_pretrained(folder / name)


def forecaster(config: RunConfig) -> Forecaster:
    return Forecaster(config, task_class(config.task.type), Machine(1, 1, 2**34, "cpu", None, 0.4), None)


def train(folder: Path, model: str, settings: str) -> dict[str, int]:
    """Three steps with the largest micro-batches; bytes of what is held then."""
    config = configure(folder, model, settings)
    made, world = forecaster(config), Distributed(RankInfo(), HOST, 60)
    config, sample = made.resolve(config), made.sample_for(config)
    rows, count = rows_and_count(config, world, sample)
    task = made.make_task(config)
    task = make_task(type(task), replace(task.task_context, weightless=False))
    micro = worst_micro_batch(task, config, sample, rows)
    engine = assemble_engine(task, config, world, total_steps=3)
    for _ in range(3):
        engine.train_step([micro] * count)
    return {"parameters": sizes(list(engine.module.parameters()))}


def memory(name: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{name}:"))


def measure(_: int, folder: Path, settings: str) -> None:
    torch.set_num_threads(2)
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    train(folder, "small", settings)  # whatever is loaded once is there afterwards
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    found = train(folder, "qwen2", settings)
    found |= {"peak": memory("VmHWM") - before, "before": before}
    (folder / "measured.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "adapter_memory.json")
    parser.add_argument("--only", default="", help="settings to measure, such as lora.base=nf4")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        torch.multiprocessing.spawn(_save, (folder,))
        for settings in [arguments.only] if arguments.only else BASES:
            config = configure(folder, "qwen2", settings)
            made = forecaster(config)
            config = made.resolve(config)
            work = partial(forecast_rank, made.make_task, config, made.sample_for(config), ParallelDims(), 0, 1, True)
            planned = in_own_process(work, "it", 300)
            torch.multiprocessing.spawn(measure, (folder, settings))
            measured = json.loads((folder / "measured.json").read_text())
            row = {"settings": settings, "planned": planned.peak.bytes, "parameters": planned.parameters}
            rows.append({**row, "optimizer": planned.optimizer, "measured": measured})
            error = measured["peak"] / planned.peak.bytes - 1
            print(f"{settings:40} planned {planned.peak.bytes / 2**20:,.0f} MiB, measured {error:+.1%}", flush=True)
    if not arguments.only:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


def _save(_: int, folder: Path) -> None:
    save_random(folder)


if __name__ == "__main__":
    main()
