"""The built-in tasks on one CUDA device: the losses, scores and predictions of the CPU, padded and packed."""

import json
from pathlib import Path

import pytest
import torch

from runs import fit_in, losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BERT = "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4}"
T5 = "{d_model: 32, d_ff: 48, num_layers: 2, num_heads: 4, d_kv: 8, dropout_rate: 0.0}"
TASKS = {
    "sequence_classification": ("task.model=bert", f"task.from_scratch={BERT}", "eval.metric=accuracy"),
    "masked_lm": ("task.model=bert", f"task.from_scratch={BERT}"),
    "seq2seq": ("task.model=t5", f"task.from_scratch={T5}", "task.generation={max_new_tokens: 8}"),
}
COMMON = (
    "task.tokenizer={train: byte_bpe, vocab_size: 300}",
    "train.steps=6",
    "train.global_batch=8",
    "optim={lr: 1e-3}",
    "eval.every=3",
    "tracking.log_every=1",
    "data.train=train.jsonl",
    "data.validation=train.jsonl",
    "data.sequence_length=64",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    records = [
        {"text": f"the load {n}", "label": n % 2, "source": f"load {n}", "target": f"{n} load"} for n in range(40)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "config.yaml").write_text("run: {dir: runs}\n")
    return tmp_path


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_a_run_is_that_of_the_cpu(task: str, batching: str, project: Path) -> None:
    dropout = () if task == "seq2seq" else ("task.from_scratch.hidden_dropout_prob=0.0",)
    attention = () if task == "seq2seq" else ("task.from_scratch.attention_probs_dropout_prob=0.0",)
    settings = (*COMMON, f"task.type={task}", *TASKS[task], *dropout, *attention, f"data.batching={batching}")
    for device in ("cpu", "cuda"):
        fit_in(project, *settings, f"device={device}", "precision=fp32", f"run.name={device}")
    on_cpu, on_cuda = losses(project / "runs" / "cpu"), losses(project / "runs" / "cuda")
    assert on_cuda == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_without_padding_in_bf16(task: str, project: Path) -> None:
    """By flash attention for any lengths, and, where it cannot (T5's bias), by groups."""
    settings = (*COMMON, f"task.type={task}", *TASKS[task], "device=cuda", "precision=bf16")
    for name, free in (("padded", "false"), ("free", "true")):
        fit_in(project, *settings, f"data.padding_free={free}", f"run.name={name}")
    padded, free = losses(project / "runs" / "padded"), losses(project / "runs" / "free")
    assert free == pytest.approx(padded, rel=0.05)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_generation_in_an_evaluation_in_half_precision(precision: str, project: Path) -> None:
    fit_in(project, *COMMON, "task.type=seq2seq", *TASKS["seq2seq"], "device=cuda", f"precision={precision}")
    lines = (project / "runs" / "run" / "eval" / "validation" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 40
    assert all(isinstance(json.loads(line)["prediction"], str) for line in lines)
