"""How fast does a run train beside another program, whose threads take one of the cores?

    python -m benchmarks.busy_neighbour

Each run is a process of its own, which trains the same Llama in fp32 on random tokens for some seconds; all runs take
turns, on a quiet machine and beside one busy loop. Prints a table of medians, writes JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drawbar.tracking.table import print_table

ROWS, LENGTH, VOCABULARY = 8, 128, 4096
WARM_UP = 2
"""Steps that are not counted."""
SPINNING = {"GOMP_SPINCOUNT": "300000"}
"""libgomp's own default, given as a user's choice, so that drawbar leaves it."""
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "drawbar": ("drawbar", {}),
    "drawbar, libgomp's default": ("drawbar", SPINNING),
    "drawbar, passive alone": ("drawbar", {"OMP_WAIT_POLICY": "passive"}),
    "drawbar, one thread": ("drawbar", {"OMP_NUM_THREADS": "1"}),
    "drawbar, two ranks (DDP)": ("ranks", {}),
    "Hugging Face Trainer": ("trainer", SPINNING),
    "a loop by hand": ("loop", SPINNING),
}
"""What trains, and its environment. Those without drawbar load torch after this file has imported it, so they are told
libgomp's default as well."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of training, in each run")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/busy_neighbour.json"))
    parser.add_argument("--program", choices=sorted(PROGRAMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        PROGRAMS[options.program](options.seconds)
        return
    from benchmarks.common.report import write_answer  # random_tokens.py imports this file from its own folder

    found = measure(options.rounds, options.seconds)
    rows = [[name, *(f"{statistics.median(found[name][where]):,.0f}" for where in ("quiet", "busy"))] for name in found]
    print_table("Target tokens a second (median)", ["run", "quiet machine", "beside a busy loop"], rows)
    write_answer(options.json, cores=os.cpu_count(), results=found)


def measure(rounds: int, seconds: float, names: Iterable[str] = tuple(RUNS)) -> dict[str, dict[str, list[float]]]:
    """Tokens a second of each run in each round, by ``quiet`` and ``busy``."""
    found: dict[str, dict[str, list[float]]] = {name: {"quiet": [], "busy": []} for name in names}
    for _ in range(rounds):
        for name in names:
            found[name]["quiet"].append(run(*RUNS[name], seconds))
        with ExitStack() as stack:
            neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(neighbour.kill)
            for name in names:
                found[name]["busy"].append(run(*RUNS[name], seconds))
    return found


def run(program: str, environment: dict[str, str], seconds: float) -> float:
    """Tokens a second of one process."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, __file__, "--program", program, "--seconds", str(seconds)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=environ | environment, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{program} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


class Clock:
    """Counts the tokens of steps, and says when to stop."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps, self.started = seconds, 0, 0.0

    def step(self) -> bool:
        """After each step; whether the time is up."""
        self.steps += 1
        if self.steps == WARM_UP:
            self.started = time.perf_counter()
        return self.steps > WARM_UP and time.perf_counter() - self.started > self.seconds

    def tokens_per_second(self) -> float:
        return (self.steps - WARM_UP) * ROWS * (LENGTH - 1) / (time.perf_counter() - self.started)


def make_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def by_hand(seconds: float) -> None:
    import torch

    model, clock = make_model(), Clock(seconds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH))
    while not clock.step():
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(clock.tokens_per_second())


def by_trainer(seconds: float) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock(seconds)

    class Stop(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_training_stop = clock.step()

    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(VOCABULARY, (ROWS * 100, LENGTH))]
    arguments = TrainingArguments(
        "trainer", max_steps=10**6, per_device_train_batch_size=ROWS, use_cpu=True, report_to=[], disable_tqdm=True
    )
    Trainer(make_model(), arguments, train_dataset=rows, callbacks=[Stop()]).train()
    print(clock.tokens_per_second())


def by_drawbar(seconds: float, *settings: str) -> None:
    """The clock goes by the times in the run's metrics: a signal ends the run."""
    overrides = [
        f"train={{global_batch: {ROWS}, steps: 1000000}}",
        "precision=fp32",
        "device=cpu",
        "data.train=none",
        "checkpoint={every: null, keep_best: false}",
        "tracking={log_every: 1, tensorboard: false}",
    ]
    command = [sys.executable, str(Path(__file__).with_name("random_tokens.py")), "train", *overrides, *settings]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(times := read_times()) <= WARM_UP or times[-1] - times[WARM_UP - 1] < seconds:
        if process.poll() is not None:
            raise SystemExit(f"drawbar ended with {process.returncode}")
        time.sleep(0.2)
    process.kill()
    process.wait()
    print((len(times) - WARM_UP) * ROWS * (LENGTH - 1) / (times[-1] - times[WARM_UP - 1]))


def read_times() -> list[float]:
    """When each step was logged."""
    path = Path("runs/run/metrics.jsonl")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["time"] for line in lines if line.endswith("\n")]


PROGRAMS: dict[str, Callable[[float], None]] = {
    "loop": by_hand,
    "trainer": by_trainer,
    "drawbar": by_drawbar,
    "ranks": lambda seconds: by_drawbar(seconds, "launch.nproc=2"),
}

if __name__ == "__main__":
    main()
