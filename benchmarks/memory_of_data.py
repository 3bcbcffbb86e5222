"""How much memory do encoding and starting take, as the data grow?

    python benchmarks/memory_of_data.py --megabytes 300 2000

For each size it writes JSONL of made-up documents, encodes it with `drawbar prepare`, and trains one step from the
cache on several ranks, with documents packed. Prints a table of what the largest process took above what `import`
takes, and of what all processes together read; writes JSON.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from drawbar.tracking.table import print_table

MB = 10**6
MIB = 2**20
VOCABULARY = 5000
"""Words, as in ``language_of_words.py``."""
CONFIG = """
task:
  type: causal_lm
  model: gpt2
  from_scratch: {n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512, vocab_size: 5000}
data: {train: train.jsonl, sequence_length: 512, batching: packed}
train: {global_batch: 8, steps: 1}
checkpoint: {keep: 1}
tracking: {tensorboard: false}
device: cpu
precision: fp32
"""
IMPORTS = "import drawbar.cli, drawbar.train.trainer, drawbar.commands.prepare_data, drawbar.models.huggingface"
SMALLEST = "smallest"
"""The run on a few records: what it reads are Python's own files."""


@dataclass
class Measured:
    """What a command and all processes below it came to."""

    seconds: float
    memory: int
    """Bytes that the largest process had at its highest."""
    read: int
    """Bytes that all of them read, from files of any kind."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[300, 600], help="sizes of the JSONL")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workers", default="auto", help="data.workers")
    parser.add_argument("--folder", type=Path, help="where to write the data; default: a temporary folder")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/memory_of_data.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = compare(options.megabytes, options.ranks, options.workers, Path(folder))
    show(found)
    from training import machine  # which loads torch

    about = {"machine": machine("cpu"), "cores": os.cpu_count(), "ranks": options.ranks}
    report = {"date": date.today().isoformat(), **about, "results": found}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def compare(megabytes: list[float], ranks: int, workers: str, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """What each command came to, by the size of the data."""
    imports = watch([sys.executable, "-c", IMPORTS], folder)
    found = {"": {"import": asdict(imports)}}
    for size in [0.1, *megabytes]:
        run = folder / f"{size}"
        run.mkdir()
        (run / "config.yaml").write_text(CONFIG, encoding="utf-8")
        write_records(run / "train.jsonl", round(size * MB))
        time.sleep(3)  # a file that changed a moment ago is hashed again
        drawbar = [sys.executable, str(Path(__file__).with_name("language_of_words.py"))]
        commands = {
            "encode": [*drawbar, "prepare", "config.yaml", f"data.workers={workers}"],
            "start": [*drawbar, "train", "config.yaml", f"launch.nproc={ranks}"],
        }
        name = SMALLEST if size == 0.1 else f"{size} MB"
        found[name] = {what: asdict(watch(command, run)) for what, command in commands.items()}
        shutil.rmtree(run)
    return found


def show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    imports = found[""]["import"]["memory"]
    rows = []
    for size, commands in found.items():
        for what, measured in commands.items():
            above = f"{(measured['memory'] - imports) / MIB:,.0f}" if size else ""
            read = f"{measured['read'] / MB:,.0f}"
            rows.append([size, what, f"{measured['seconds']:,.0f}", f"{measured['memory'] / MIB:,.0f}", above, read])
    head = ["data", "command", "seconds", "MiB a process", "above import", "MB read in all"]
    print_table("Memory of the largest process, at its highest", head, rows)


def write_records(path: Path, size: int) -> None:
    """JSONL of about so many bytes."""
    chance = random.Random(0)
    words = [f"w{number:04d}" for number in range(VOCABULARY)]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            count = chance.randint(20, 300)
            written += file.write(json.dumps({"text": " ".join(chance.choices(words, k=count))}) + "\n")


def watch(command: list[str], folder: Path) -> Measured:
    """Run a command, and look again and again at all processes below it."""
    started = time.perf_counter()
    memory: dict[int, int] = {}
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            for pid in below(process.pid):
                memory[pid] = max(memory.get(pid, 0), 1024 * number(pid, "status", "VmHWM:"))
            time.sleep(0.02)
        read = number(process.pid, "io", "rchar:")  # with that of all below it, as each was waited for
        process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(folder / 'log.txt').read_text(encoding='utf-8')[-3000:]}")
    return Measured(time.perf_counter() - started, max(memory.values()), read)


def below(pid: int) -> list[int]:
    """A process and all that it started, at any depth."""
    found = [pid]
    for parent in found:
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
            found += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:  # it has ended
            continue
    return found


def number(pid: int, file: str, key: str) -> int:
    """A number of ``/proc``; 0 where the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)


if __name__ == "__main__":
    main()
