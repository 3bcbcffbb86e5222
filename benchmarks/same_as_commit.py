"""Does the program still compute what it computed at an earlier commit?

    python benchmarks/same_as_commit.py COMMIT [--only NAME]... [--json FILE]

Each of the runs below is made with the code of that commit and with the code here: trained whole, trained again from
its middle checkpoint (some with other processes), evaluated, and, on one process, used to predict, to generate and to
export. All losses, norms, scores, texts and exported tensors must be the same bits.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parents[1]
STEPS, SAVED = 6, 3
CONFIG = """\
train: {global_batch: 8, micro_batch: 2, steps: 6}
optim: {lr: 1.0e-2, warmup: 2}
precision: fp32
device: cpu
eval: {every: 3}
checkpoint: {every: 3, keep: 5}
tracking: {log_every: 1, tensorboard: false}
"""
LLAMA = """\
  model: llama
  from_scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4,
                 num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}
  tokenizer: {train: byte_bpe, vocab_size: 300}
"""
BERT = """\
  model: bert
  from_scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4}
"""
TEXTS = "data: {train: train.txt, validation: valid.txt, sequence_length: 48}\n"
TASKS = {
    "lm": f"task:\n{LLAMA}{TEXTS}",
    "gpt2": f"""\
task:
  model: gpt2
  from_scratch: {{n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64}}
  tokenizer: {{train: byte_bpe, vocab_size: 300}}
{TEXTS}""",
    "chat": f"""\
task:
{LLAMA}  messages_column: messages
  chat_template: "{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}<|endoftext|>{{% endfor %}}"
  generation: {{max_new_tokens: 8}}
data: {{train: chats.jsonl, validation: chats.jsonl, sequence_length: 48}}
""",
    "seq2seq": """\
task:
  type: seq2seq
  model: t5
  from_scratch: {d_model: 32, d_ff: 48, num_layers: 2, num_heads: 4, d_kv: 8}
  tokenizer: {train: byte_bpe, vocab_size: 300}
  generation: {max_new_tokens: 8, beams: 2}
data: {train: pairs.jsonl, validation: pairs.jsonl, sequence_length: 48}
""",
    "classification": f"""\
task:
  type: sequence_classification
{BERT}  tokenizer: {{train: byte_bpe, vocab_size: 300}}
data: {{train: labels.jsonl, validation: labels.jsonl, sequence_length: 48}}
""",
    "masked": f"task:\n  type: masked_lm\n{BERT}  tokenizer: {{train: byte_bpe, vocab_size: 300}}\n{TEXTS}",
    "lora": f"task: {{model: base}}\nlora: {{rank: 4}}\n{TEXTS}",
}


@dataclass(frozen=True)
class Kind:
    """One run."""

    settings: str = ""
    processes: int = 1
    task: str = "lm"
    resumed_with: str = ""
    """Settings of the part after the middle checkpoint."""


KINDS = {
    "single": Kind(),
    "bf16": Kind("precision=bf16"),
    "fp16": Kind("precision=fp16"),
    "muon, packed": Kind("optim.name=muon data.batching=packed"),
    "grouped": Kind("data.batching=grouped data.padding_free=false"),
    "padding-free": Kind("data.padding_free=true"),
    "adafactor, accumulated": Kind("optim.name=adafactor train.micro_batch=1 optim.schedule=cosine"),
    "checkpointed activations": Kind("parallel.activation_checkpointing=full"),
    "stream": Kind("data.streaming=true data.train=parts/*.txt data.shuffle_buffer=32 data.stream_lanes=4"),
    "packed stream": Kind(
        "data.streaming=true data.batching=packed data.train=parts/*.txt data.shuffle_buffer=32 data.stream_lanes=4",
        2,
        resumed_with="launch.nproc=1",
    ),
    "gpt2": Kind(task="gpt2"),
    "chat": Kind(task="chat"),
    "chat, packed": Kind("data.batching=packed", task="chat"),
    "seq2seq": Kind(task="seq2seq"),
    "classification": Kind(task="classification"),
    "masked": Kind(task="masked"),
    "lora": Kind(task="lora"),
    "ddp": Kind("parallel.strategy=ddp", 2),
    "ddp, then one": Kind("parallel.strategy=ddp", 2, resumed_with="launch.nproc=1 parallel.strategy=single"),
    "zero1": Kind("parallel.strategy=zero1", 2),
    "fsdp": Kind("parallel.strategy=fsdp", 2),
    "fsdp, then zero1 of four": Kind(
        "parallel.strategy=fsdp", 2, resumed_with="launch.nproc=4 parallel.strategy=zero1 train.micro_batch=1"
    ),
    "fsdp, lora": Kind("parallel.strategy=fsdp", 2, task="lora"),
    "tensor": Kind("parallel.tensor=2", 2),
    "tensor of gpt2": Kind("parallel.tensor=2", 2, task="gpt2"),
    "pipeline": Kind("parallel.pipeline=2", 2),
    "ddp of seq2seq": Kind("parallel.strategy=ddp", 2, task="seq2seq"),
    "interleaved fsdp": Kind("parallel.strategy=fsdp parallel.pipeline=2 parallel.schedule=interleaved", 4),
    "fsdp and tensor": Kind("parallel.strategy=fsdp parallel.tensor=2", 4),
    "deepspeed 2": Kind("parallel.strategy=deepspeed parallel.zero_stage=2", 2),
    "deepspeed 3": Kind("parallel.strategy=deepspeed parallel.zero_stage=3", 2, resumed_with="launch.nproc=1"),
    "deepspeed pipeline": Kind("parallel.strategy=deepspeed parallel.pipeline=2", 2),
}


@dataclass
class Outcome:
    """What a kind of run gave, by name."""

    numbers: dict[str, Any] = field(default_factory=dict)
    """Numbers, or arrays of them."""
    texts: dict[str, str] = field(default_factory=dict)

    def apart(self, other: "Outcome") -> tuple[float, list[str]]:
        """The largest relative difference of a number, and the names of all that differs."""
        wrong = [
            name
            for mine, its in ((self.numbers, other.numbers), (self.texts, other.texts))
            for name in mine.keys() ^ its
        ]
        wrong += [name for name in self.texts if name in other.texts and self.texts[name] != other.texts[name]]
        largest = 0.0
        for name in self.numbers.keys() & other.numbers.keys():
            one, two = (np.asarray(each.numbers[name], np.float64) for each in (self, other))
            if one.shape != two.shape:
                wrong.append(name)
            elif not np.array_equal(one, two, equal_nan=True):
                wrong.append(name)
                largest = max(largest, float(np.nanmax(np.abs(one - two)) / (np.nanmax(np.abs(one)) or math.inf)))
        return largest, sorted(wrong)


def drawbar(source: Path, folder: Path, *words: str) -> str:
    """Run a command with the code in ``source``; its output. Raises SystemExit where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1", "DRAWBAR_LINES": "1"}
    command = [sys.executable, "-m", "drawbar", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} with the code in {source} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def outcome(name: str, source: Path, folder: Path) -> Outcome:
    """What the code in ``source`` makes of a kind of run."""
    kind, found = KINDS[name], Outcome()
    runs = folder / "runs"
    (folder / "config.yaml").write_text(TASKS[kind.task] + CONFIG)
    words = ["config.yaml", *kind.settings.split(), f"launch.nproc={kind.processes}"]
    drawbar(source, folder, "train", *words, "run.name=whole")
    shutil.copytree(runs / "whole", runs / "resumed")
    shutil.rmtree(runs / "resumed" / "checkpoints" / f"step-{STEPS:08d}")
    drawbar(source, folder, "train", *words, *kind.resumed_with.split(), "run.name=resumed")
    for run in ("whole", "resumed"):
        found.numbers |= {f"{run}: {key}": value for key, value in logged(runs / run).items()}
    drawbar(source, folder, "eval", "runs/whole", "--checkpoint", "latest")
    evaluated = runs / "whole" / "eval" / "validation"
    found.numbers |= {f"eval: {key}": value for key, value in flat(json.loads(read(evaluated / "scores.json")))}
    drawbar(source, folder, "export", "runs/resumed", "--to", "exported", "--checkpoint", "latest")
    for part in sorted((folder / "exported").glob("*.safetensors")):
        found.numbers |= {f"export: {key}": tensor for key, tensor in load_file(part).items()}
    if kind.processes == 1:
        found.texts = written(kind, source, folder)
    shutil.rmtree(runs)
    shutil.rmtree(folder / "exported")
    return found


def written(kind: Kind, source: Path, folder: Path) -> dict[str, str]:
    """What the trained run predicts and generates."""
    texts = {}
    if kind.task in ("chat", "seq2seq", "classification"):
        data = {"chat": "chats", "seq2seq": "pairs", "classification": "labels"}[kind.task]
        drawbar(source, folder, "predict", "runs/whole", "--input", f"{data}.jsonl", "--output", "out.jsonl")
        texts["predict"] = read(folder / "out.jsonl")
        (folder / "out.jsonl").unlink()
        evaluated = folder / "runs" / "whole" / "eval" / "validation" / "predictions.jsonl"
        texts["eval"] = read(evaluated) if evaluated.exists() else ""
    if kind.task in ("lm", "gpt2", "lora", "chat"):
        for sampling in (["--temperature", "0"], ["--beams", "2"], ["--temperature", "1", "--seed", "3"]):
            prompts = ["--prompt", "The run", "--prompt", "is", "--max-new-tokens", "8"]
            texts[f"generate {' '.join(sampling)}"] = drawbar(
                source, folder, "generate", "runs/whole", *prompts, *sampling
            )
    return texts


def read(path: Path) -> str:
    return path.read_text("utf-8")


def logged(run: Path) -> dict[str, float]:
    """Losses, norms and scores by name and step."""
    lines = [json.loads(line) for line in read(run / "metrics.jsonl").splitlines()]
    timed = ("time", "second", "memory", "utilization", "step")
    return {
        f"{key} at {line['step']}": value
        for line in lines
        for key, value in line.items()
        if key.startswith(("train/", "eval/")) and not any(word in key for word in timed)
    }


def flat(scores: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested dicts."""
    for key, value in scores.items():
        if isinstance(value, dict):
            yield from flat(value, f"{name}{key}.")
        elif isinstance(value, int | float):
            yield f"{name}{key}", value


def write_files(folder: Path) -> None:
    """The data of all runs, and a base model to tune."""
    text = "\n".join(line for line in read(HERE / "README.md").splitlines() if line)
    (folder / "train.txt").write_text(text[1000:])
    (folder / "valid.txt").write_text(text[:1000])
    (folder / "parts").mkdir()
    lines = text[1000:].splitlines()
    for number in range(3):
        (folder / "parts" / f"{number}.txt").write_text("\n".join(lines[number::3]) + "\n")
    sentences = [" ".join(line.split()[:5]) for line in lines if len(line.split()) > 3][:40]

    def records(name: str, made: list[dict[str, Any]]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made))

    both = list(pairwise(sentences))
    chats = [
        [("user", one), ("assistant", two), ("user", two), ("assistant", one)][: 2 + 2 * (len(one) % 2)]
        for one, two in both
    ]
    records("chats", [{"messages": [{"role": role, "content": what} for role, what in chat]} for chat in chats])
    records("pairs", [{"source": one, "target": two} for one, two in both])
    records("labels", [{"text": one, "label": ("even", "odd")[len(two) % 2]} for one, two in both])


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    git = ["git", "-C", str(HERE), "worktree"]
    subprocess.run([*git, "add", "-q", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def project(folder: Path, source: Path) -> Path:
    """A folder for the runs of one code, with its data, tokenizer and base model."""
    folder.mkdir()
    write_files(folder)
    (folder / "config.yaml").write_text(TASKS["lm"] + CONFIG)
    drawbar(source, folder, "train", "config.yaml", "launch.nproc=1", "run.name=base", "train.steps=3")
    drawbar(source, folder, "export", "runs/base", "--to", "base", "--checkpoint", "latest")
    shutil.rmtree(folder / "runs")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("--only", action="append", choices=KINDS, help="these kinds of run alone")
    parser.add_argument("--json", type=Path, help="write what differs here")
    arguments = parser.parse_args()
    differences = {}
    with (
        tempfile.TemporaryDirectory() as name,
        checked_out(arguments.commit, Path(name) / "before") as before,
        ThreadPoolExecutor(2) as both,
    ):
        sources = (before, HERE)
        folders = list(both.map(project, (Path(name) / "a", Path(name) / "b"), sources))
        for kind in arguments.only or KINDS:
            one, two = both.map(lambda source, folder, kind=kind: outcome(kind, source, folder), sources, folders)
            largest, wrong = one.apart(two)
            count = len(one.numbers) + len(one.texts)
            said = "same bits" if not wrong else f"DIFFERENT by {largest:.1e}: {', '.join(wrong[:4])}"
            print(f"{kind:26} {count:4} values  {said}", flush=True)
            differences[kind] = wrong
    if arguments.json:
        arguments.json.write_text(json.dumps(differences, indent=2) + "\n")
    sys.exit(any(differences.values()))


if __name__ == "__main__":
    main()
