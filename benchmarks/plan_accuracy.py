"""What `drawbar plan` forecasts beside what real ranks take, on a CPU: `python -m benchmarks.plan_accuracy`.

The measured side counts with other means than the planner: bytes of parameters, gradients and optimizer state from the
tensors that real ranks hold, the peak from torch's CPU allocator (``cpu_memory``), which sees what kernels take inside.
"""

import argparse
import json
import os
import random
import socket
import tempfile
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from benchmarks.cpu_memory import CpuMemory, build_counter
from benchmarks.plan_accuracy_page import RESULT
from drawbar.config.io.load_config import load_config
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import assemble_engine
from drawbar.engines.engine import Engine
from drawbar.engines.executors import count_targets
from drawbar.engines.updaters import TorchUpdater
from drawbar.parallel.zero1 import local_optimizer
from drawbar.plan.machine import Machine
from drawbar.plan.rank_forecast import forecast_rank, rows_and_count, worst_micro_batch
from drawbar.plan.run_forecast import Forecaster, in_own_process
from drawbar.runtime.seed import seed_everything
from drawbar.tasks.task_registry import task_class
from drawbar.tasks.user_methods import make_task
from drawbar.train.memory_probe import USABLE_SHARE

HOST = torch.device("cpu")
LLAMA = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 512, "max_position_embeddings": 256, "vocab_size": 4000}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"type": "causal_lm", "model": "llama", "from_scratch": LLAMA},
    "gpt2": {"type": "causal_lm", "model": "gpt2", "from_scratch": {
        "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256, "vocab_size": 4000}},
    "bert": {"type": "masked_lm", "model": "bert", "from_scratch": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024,
        "max_position_embeddings": 256, "vocab_size": 4000}},
    "t5": {"type": "seq2seq", "model": "t5", "source_column": "text", "target_column": "text", "from_scratch": {
        "d_model": 256, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 64, "d_ff": 512,
        "vocab_size": 4000}},
}  # fmt: skip
Pair = tuple[str, int, str]
"""Model, ranks, settings."""
PAIRS: list[Pair] = [
    ("llama", 1, "parallel.strategy=single"),
    ("llama", 1, "parallel.strategy=single precision=bf16"),
    ("llama", 1, "parallel.strategy=single parallel.activation_checkpointing=full"),
    ("llama", 1, "parallel.strategy=single task.cross_entropy=plain data.padding_free=false"),
    ("gpt2", 1, "parallel.strategy=single"),
    ("bert", 1, "parallel.strategy=single"),
    ("t5", 1, "parallel.strategy=single"),
    ("llama", 2, "parallel.strategy=ddp"),
    ("llama", 2, "parallel.strategy=zero1"),
    ("llama", 2, "parallel.strategy=fsdp"),
    ("llama", 2, "parallel.strategy=fsdp parallel.reshard=false"),
    ("llama", 2, "parallel.strategy=ddp parallel.tensor=2"),
    ("llama", 2, "parallel.strategy=ddp parallel.pipeline=2"),
    ("gpt2", 2, "parallel.strategy=ddp"),
    ("gpt2", 2, "parallel.strategy=fsdp precision=bf16"),
    ("bert", 2, "parallel.strategy=zero1"),
    ("bert", 2, "parallel.strategy=fsdp"),
    ("t5", 2, "parallel.strategy=ddp"),
    ("t5", 2, "parallel.strategy=fsdp"),
    ("llama", 4, "parallel.strategy=fsdp parallel.tensor=2"),
    ("gpt2", 4, "parallel.strategy=fsdp parallel.pipeline=2"),
]
STATE = ("parameters", "gradients", "optimizer")
BASE = (
    "train.steps=10", "train.global_batch=16", "train.micro_batch=2", "data.sequence_length=256", "precision=fp32",
    "device=cpu", "optim.name=adamw",
)  # fmt: skip


def configure(pair: Pair, folder: Path) -> RunConfig:
    model, _, settings = pair
    task = {**MODELS[model], "tokenizer": {"train": "byte_bpe", "vocab_size": 300}}
    data = (f"data.train={folder}/text.jsonl", f"run.dir={folder}/runs", f"task={json.dumps(task)}")
    return load_config(None, [*BASE, *data, *settings.split()]).config


def write_data(folder: Path) -> None:
    lines = (json.dumps({"text": f"the quick brown fox {number} jumps over the lazy dog"}) for number in range(100))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")


def sizes(tensors: list[Tensor]) -> int:
    parts = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def measure(forecaster: Forecaster, pair: Pair, folder: Path, rank: int, library: Path) -> dict[str, int]:
    """Two steps of a real rank."""
    config = forecaster.resolve(configure(pair, folder))
    dims = ParallelDims.of(config.parallel, pair[1])
    sample = forecaster.sample_for(config)
    with Distributed(RankInfo(rank, pair[1], rank, pair[1]), HOST, 120, dims) as world:
        made = forecaster.make_task(config)
        task = make_task(type(made), replace(made.task_context, weightless=False))
        seed_everything(0)
        rows, count = rows_and_count(config, world, sample)
        micro = worst_micro_batch(task, config, sample, rows)
        targets = count_targets(task, [micro]) * count * world.dp_ranks.size
        found: dict[str, int] = {}
        memory = CpuMemory(library)
        engine = assemble_engine(task, config, world, total_steps=100)
        memory.begin_peak()
        with engine.inspecting(partial(_look, engine, found)):
            for _ in range(2):
                engine.train_step([micro] * count, targets)
        found["peak"] = memory.peak()
        assert isinstance(engine.updater, TorchUpdater)
        states = [
            state for optimizer in engine.updater.optimizers for state in local_optimizer(optimizer).state.values()
        ]
        found["optimizer"] = sizes([value for state in states for value in state.values() if isinstance(value, Tensor)])
        found["parameters"] = sizes(list(engine.module.parameters()))
        engine.close()
    return found


def _look(engine: Engine, found: dict[str, int]) -> None:
    found["gradients"] = sizes([p.grad for p in engine.module.parameters() if p.grad is not None])


def run_rank(rank: int, ranks: int, port: int, folder: Path, pairs: list[Pair], library: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    for number, pair in enumerate(pairs):
        found = measure(make_forecaster(pair, folder), pair, folder, rank, library)
        (folder / f"{ranks}-{number}-{rank}.json").write_text(json.dumps(found))


def make_forecaster(pair: Pair, folder: Path) -> Forecaster:
    config = configure(pair, folder)
    machine = Machine(1, pair[1], 2**34, "cpu", None, 0.4)
    return Forecaster(config, task_class(config.task.type), machine, None)


def compare(pair: Pair, folder: Path, number: int, all_kinds: bool) -> list[dict[str, Any]]:
    """Forecast and measurement of the first rank, and of the last one."""
    ranks, forecaster = pair[1], make_forecaster(pair, folder)
    config = forecaster.resolve(configure(pair, folder))
    dims, sample = ParallelDims.of(config.parallel, ranks), forecaster.sample_for(config)
    rows = []
    for rank in sorted({0, ranks - 1}) if all_kinds else [0]:
        work = partial(forecast_rank, forecaster.make_task, config, sample, dims, rank, ranks, True)
        planned = in_own_process(work, f"rank {rank}", 300)
        measured = json.loads((folder / f"{ranks}-{number}-{rank}.json").read_text())
        state = {name: getattr(planned, name) for name in STATE}
        error = planned.peak.bytes / measured["peak"] - 1
        row = {"model": pair[0], "ranks": ranks, "rank": rank, "settings": pair[2], "measured": measured}
        row |= {"planned": {**state, "peak": planned.peak.bytes}, "peak_error": error, "by_kind": planned.peak.by_kind}
        rows.append(row)
        exact = all(state[name] == measured[name] for name in state)
        print(f"{pair[0]:6} {pair[2]:70} rank {rank}: {error:+.1%}{'' if exact else '  STATE DIFFERS'}", flush=True)
    return rows


def compare_all(chosen: list[Pair], all_kinds: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        library = build_counter(folder)
        for ranks, group in groupby(chosen, key=lambda pair: pair[1]):
            pairs = list(group)
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            torch.multiprocessing.spawn(run_rank, (ranks, port, folder, pairs, library), nprocs=ranks)
            for number, pair in enumerate(pairs):
                rows += compare(pair, folder, number, all_kinds)
    return rows


def draw(count: int, seed: int) -> list[Pair]:
    """Different configurations at random: three of four have one rank."""
    rng = random.Random(seed)
    drawn: set[Pair] = set()
    while len(drawn) < count:
        ranks, model = rng.choice([1, 1, 1, 2]), rng.choice(sorted(MODELS))
        rows = rng.choice([1, 2, 4])
        strategies = ["single"] if ranks == 1 else ["ddp", "zero1", "fsdp", "fsdp parallel.reshard=false"]
        if ranks > 1 and model in ("llama", "gpt2"):
            strategies += ["ddp parallel.tensor=2", "ddp parallel.pipeline=2"]
        settings = [f"parallel.strategy={rng.choice(strategies)}"]
        settings += [f"train.micro_batch={rows}", f"train.global_batch={2 * rows * ranks}"]
        settings += [f"data.sequence_length={rng.choice([64, 128, 256])}", f"precision={rng.choice(['fp32', 'bf16'])}"]
        settings += [f"parallel.activation_checkpointing={rng.choice(['none', 'none', 'selective', 'full'])}"]
        optimizers = ["optim.name=adamw", "optim.name=sgd", "optim.state_dtype=bf16"]
        if "tensor" not in settings[0] and "fsdp" not in settings[0]:  # which Adafactor refuses
            optimizers += ["optim.name=adafactor"]
        settings += [rng.choice(optimizers)]
        if model in ("llama", "gpt2"):
            settings += [f"task.cross_entropy={rng.choice(['auto', 'plain'])}"]
        settings += [f"data.padding_free={rng.choice(['auto', 'false'])}"]
        drawn.add((model, ranks, " ".join(settings)))
    return sorted(drawn, key=lambda pair: (-pair[1], pair))


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a sweep came to."""
    errors = [row["peak_error"] for row in rows]
    # the least memory of which the plan says that the run fits is its peak over the usable share
    wrong = sum(row["planned"]["peak"] / USABLE_SHARE < row["measured"]["peak"] for row in rows)
    differ = sum(any(row["planned"][name] != row["measured"][name] for name in STATE) for row in rows)
    found = {"configurations": len(rows), "false_fits": wrong, "state_differs": differ}
    return {**found, "lowest": min(errors), "highest": max(errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="pairs whose text contains this")
    parser.add_argument("--sweep", type=int, default=0, help="so many configurations at random, instead of the pairs")
    parser.add_argument("--seed", type=int, default=0, help="of the sweep")
    parser.add_argument("--write", action="store_true", help=f"add it to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [pair for pair in PAIRS if options.only in " ".join(map(str, pair))]
    rows = compare_all(draw(options.sweep, options.seed) if options.sweep else chosen, all_kinds=not options.sweep)
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    if options.sweep:
        known["sweep"] = {"seed": options.seed, **summed_up(rows)}
        print(known["sweep"])
    else:
        measured = {(row["model"], row["ranks"], row["settings"]) for row in rows}
        rows += [row for row in known["rows"] if (row["model"], row["ranks"], row["settings"]) not in measured]
        known["rows"] = sorted(rows, key=lambda row: -abs(row["peak_error"]))
    if options.write:
        RESULT.write_text(json.dumps({**known, "torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
