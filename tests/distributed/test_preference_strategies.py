"""A run of ``preference`` or ``reward`` under any strategy is the run of one process: pairs are never torn apart, the
reference is that of the initial weights, and KTO's divergence that of the global batch."""

import json
from pathlib import Path

import pytest
import torch

from exhaustive import asked, params
from harness import run_ranks
from runs import fit_in, largest_difference, losses, scores, weights

CONFIG = """\
run: {name: one}
task:
  type: preference
  model: llama
  from_scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
                 num_key_value_heads: 2, max_position_embeddings: 64, initializer_range: 0.1}
  tokenizer: {train: byte_bpe, vocab_size: 300}
data: {train: records.jsonl, validation: records.jsonl, sequence_length: 32}
train: {global_batch: 8, micro_batch: 2, steps: 4}
optim: {name: sgd, lr: 0.3, schedule: constant}
precision: fp32
device: cpu
tracking: {log_every: 1, tensorboard: false}
"""
TASKS = {"dpo": [], "kto": ["task.method=kto"], "orpo": ["task.method=orpo"], "reward": ["task.type=reward"]}
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "zero1": ["strategy=zero1"],
    "fsdp": ["strategy=fsdp"],
    "tensor": ["tensor=2"],
    "1f1b": ["pipeline=2"],
    **{f"deepspeed {stage}": ["strategy=deepspeed", f"zero_stage={stage}"] for stage in (1, 3)},
}
CASES = params(
    [(task, name) for task in TASKS for name in STRATEGIES if (task, name) != ("reward", "1f1b")],
    [("dpo", "ddp"), ("dpo", "1f1b"), ("kto", "fsdp"), ("kto", "tensor"), ("reward", "fsdp"), ("reward", "tensor")],
)
WORDS = ["the", "load", "and", "an", "engine", "pulls", "along"]


def write_records(path: Path) -> None:
    lines = []
    for number in range(30):
        words = [WORDS[(number * step + step) % len(WORDS)] for step in range(1, 4 + number % 5)]
        answers = {"chosen": f" {' '.join(words[::-1])}", "rejected": f" {words[0]} {words[-1]}"}
        judged = {"completion": answers["chosen" if number % 3 else "rejected"], "label": bool(number % 3)}
        lines.append(json.dumps({"prompt": " ".join(words), **answers, **judged}))
    path.write_text("\n".join(lines) + "\n")


def train_all(folder: str, cases: list[tuple[str, str]]) -> None:
    torch.manual_seed(0)
    for task, name in cases:
        parallel = [f"parallel.{setting}" for setting in STRATEGIES[name]]
        fit_in(Path(folder), *TASKS[task], *parallel, f"run.name={task}-{name.replace(' ', '-')}")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preference")
    write_records(folder / "records.jsonl")
    (folder / "config.yaml").write_text(CONFIG)
    cases = asked(request, "task", "name")
    for task in dict.fromkeys(task for task, _ in cases):
        fit_in(folder, *TASKS[task], f"run.name={task}")
    run_ranks(train_all, 2, str(folder), cases, timeout=500)
    return folder / "runs"


@pytest.mark.parametrize(("task", "name"), CASES)
def test_it_is_the_run_of_one_process(runs: Path, task: str, name: str) -> None:
    one, run = runs / task, runs / f"{task}-{name.replace(' ', '-')}"
    assert len(set(losses(one).values())) == 4
    assert largest_difference(losses(one), losses(run)) <= 1e-5
    assert scores(run)[4] == pytest.approx(scores(one)[4], rel=1e-4, abs=1e-5)
    wanted, found = weights(one, 4), weights(run, 4)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
