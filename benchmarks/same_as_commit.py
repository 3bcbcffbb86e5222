"""Does the program still compute what it computed at an earlier commit?

    python benchmarks/same_as_commit.py COMMIT [--only NAME] [--here SETTING]... [--json FILE]

Twelve configurations are trained with the code of that commit and with the code here, from the same seed: losses must
be the same bits on one process, and within 1e-6 on several. ``--here`` gives the code here a setting that the earlier
one did not have, where it computes in another order by default. Then the code here goes on with the earlier code's
checkpoint, and evaluates its run directory: that must be the earlier run, too.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
STEPS, SAVED = 6, 3
SEVERAL = 1e-6
CONFIG = """\
task:
  model: llama
  from_scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4,
                 num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}
  tokenizer: {train: byte_bpe, vocab_size: 300}
data: {train: train.txt, validation: valid.txt, sequence_length: 48}
train: {global_batch: 8, micro_batch: 2, steps: 6}
optim: {lr: 1.0e-2, warmup: 2}
precision: fp32
device: cpu
eval: {every: 3}
checkpoint: {every: 3, keep: 5}
tracking: {log_every: 1, tensorboard: false}
"""
RUNS = {
    "single": (1, []),
    "single, bf16": (1, ["precision=bf16"]),
    "single, muon, packed": (1, ["optim.name=muon", "data.batching=packed"]),
    "ddp": (2, ["parallel.strategy=ddp"]),
    "zero1": (2, ["parallel.strategy=zero1"]),
    "fsdp": (2, ["parallel.strategy=fsdp"]),
    "tensor": (2, ["parallel.tensor=2"]),
    "pipeline": (2, ["parallel.pipeline=2"]),
    "interleaved fsdp": (4, ["parallel.strategy=fsdp", "parallel.pipeline=2", "parallel.schedule=interleaved"]),
    "fsdp and tensor": (4, ["parallel.strategy=fsdp", "parallel.tensor=2"]),
    "deepspeed 2": (2, ["parallel.strategy=deepspeed", "parallel.zero_stage=2"]),
    "deepspeed 3": (2, ["parallel.strategy=deepspeed", "parallel.zero_stage=3"]),
}


@dataclass(frozen=True)
class Row:
    """One configuration, by both commits."""

    name: str
    processes: int
    largest_difference: float
    """Of a loss of the same step, relative."""
    resumed_difference: float
    """The same, where the code here goes on from the earlier code's checkpoint."""
    evaluation_difference: float
    """Of the loss that ``drawbar eval`` gives of the earlier run."""

    @property
    def limit(self) -> float:
        return 0.0 if self.processes == 1 else SEVERAL

    @property
    def is_same(self) -> bool:
        return max(self.largest_difference, self.resumed_difference, self.evaluation_difference) <= self.limit


def drawbar(source: Path, folder: Path, *words: str) -> str:
    """Run a command with the code in ``source``; its output. Raises CalledProcessError where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1", "DRAWBAR_LINES": "1"}
    command = [sys.executable, "-m", "drawbar", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} with the code in {source} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def losses(run: Path) -> dict[tuple[str, int], float]:
    """By name and step: training's and the evaluations'."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = ("train/loss", "train/grad_norm", "eval/validation/loss")
    return {(kind, int(line["step"])): line[kind] for line in lines for kind in kinds if kind in line}


def apart(one: dict[tuple[str, int], float], other: dict[tuple[str, int], float]) -> float:
    """The largest relative difference."""
    if one.keys() != other.keys():
        raise SystemExit(f"the runs log different things: {sorted(one.keys() ^ other.keys())}")
    return max(abs(one[key] - other[key]) / abs(one[key]) for key in one)


def compare(name: str, before: Path, after: Path, folder: Path, here: list[str]) -> Row:
    """Train, resume and evaluate."""
    processes, settings = RUNS[name]
    words = ["config.yaml", *settings, f"launch.nproc={processes}"]
    runs = folder / "runs"
    drawbar(before, folder, "train", *words, "run.name=before")
    drawbar(after, folder, "train", *words, *here, "run.name=after")
    shutil.rmtree(runs / "resumed", ignore_errors=True)
    shutil.copytree(runs / "before", runs / "resumed")
    shutil.rmtree(runs / "resumed" / "checkpoints" / f"step-{STEPS:08d}")
    expected = losses(runs / "before")
    drawbar(after, folder, "eval", "runs/before", "--checkpoint", str(STEPS))
    found = json.loads((runs / "before" / "eval" / "validation" / "scores.json").read_text())
    drawbar(after, folder, "train", *words, "run.name=resumed")
    row = Row(
        name,
        processes,
        apart(expected, losses(runs / "after")),
        apart(expected, losses(runs / "resumed")),
        abs(found["loss"] / expected["eval/validation/loss", STEPS] - 1),
    )
    shutil.rmtree(runs)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("--only", choices=RUNS, help="one configuration")
    parser.add_argument("--here", action="append", default=[], help="a setting of the code here alone, in new runs")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        before, folder = Path(name) / "before", Path(name) / "project"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(before), arguments.commit], check=True)
        try:
            folder.mkdir()
            (folder / "config.yaml").write_text(CONFIG)
            text = (HERE / "README.md").read_text("utf-8").replace("\n\n", "\n")
            (folder / "train.txt").write_text(text[1000:])
            (folder / "valid.txt").write_text(text[:1000])
            for one in [arguments.only] if arguments.only else RUNS:
                rows.append(compare(one, before, HERE, folder, arguments.here))
                row = rows[-1]
                print(
                    f"{row.name:22} {row.processes} ranks  trained {row.largest_difference:.1e}  resumed "
                    f"{row.resumed_difference:.1e}  evaluated {row.evaluation_difference:.1e}  "
                    f"{'same' if row.is_same else 'DIFFERENT'}",
                    flush=True,
                )
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    sys.exit(not all(row.is_same for row in rows))


if __name__ == "__main__":
    main()
