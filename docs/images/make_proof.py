"""Makes ``docs/images/proof.svg``: a run as it is, one that `kill -9` ends three times, and one on two processes.

    .venv/bin/python docs/images/make_proof.py

Takes some minutes, and needs matplotlib.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 150
KILLED_AFTER = (35, 75, 120)
SETTINGS = (
    *("task.from_scratch.hidden_size=64", "task.from_scratch.intermediate_size=176", "train.global_batch=4"),
    *("task.tokenizer.vocab_size=512", "data.limit={train: 40, validation: 5}", "checkpoint.every=10"),
    *("precision=fp32", "tracking.log_every=1", "eval.every=null", "data.validation=null", "device=cpu"),
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "python_stdlib"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = finished(start(folder, "whole"), folder, "whole")
        for step in KILLED_AFTER:
            process = start(folder, "killed")
            while process.poll() is None and max(losses(folder, "killed"), default=0) < step:
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        killed = finished(start(folder, "killed"), folder, "killed")
        pair = finished(start(folder, "pair", "launch.nproc=2"), folder, "pair")
    draw(whole, killed, pair)


def start(folder: Path, name: str, *settings: str) -> subprocess.Popen[bytes]:
    arguments = [
        "train",
        str(EXAMPLE / "config.yaml"),
        f"run.name={name}",
        f"train.steps={STEPS}",
        *SETTINGS,
        *settings,
    ]
    return subprocess.Popen([sys.executable, "-m", "drawbar", *arguments], cwd=folder, stdout=subprocess.DEVNULL)


def finished(process: subprocess.Popen[bytes], folder: Path, name: str) -> dict[int, float]:
    if process.wait():
        raise SystemExit(f"{name} ended with {process.returncode}")
    return losses(folder, name)


def losses(folder: Path, name: str) -> dict[int, float]:
    path = folder / "runs" / name / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        if path.exists()
        else []
    )
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def draw(whole: dict[int, float], killed: dict[int, float], pair: dict[int, float]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "drawbar"
    from matplotlib import pyplot

    def differs(other: dict[int, float]) -> float:
        return max(abs(other[step] - loss) / loss for step, loss in whole.items())

    equal = "every loss bitwise equal" if killed == whole else f"largest difference {differs(killed):.1e}"
    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    axes.plot(whole.keys(), whole.values(), color="#888", linewidth=5, alpha=0.45, label="one process")
    axes.plot(
        killed.keys(),
        killed.values(),
        color="#1f6feb",
        label=f"killed three times (kill -9), and started again: {equal}",
    )
    axes.plot(
        pair.keys(), pair.values(), color="#d1242f", linestyle=":", label=f"two processes: equal to {differs(pair):.0e}"
    )
    for step in KILLED_AFTER:
        axes.axvline(step, color="#1f6feb", alpha=0.35, linewidth=1)
        axes.annotate("kill -9", (step, min(whole.values())), xytext=(3, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="step", ylabel="loss", xlim=(0, STEPS))
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(Path(__file__).with_name("proof.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
