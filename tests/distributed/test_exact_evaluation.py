"""Scores and predictions do not depend on the number of processes, nor on the size of a batch."""

import json
from contextlib import chdir
from pathlib import Path

import pytest

import drawbar
from drawbar.commands.score_run import evaluate_run
from exhaustive import asked
from harness import run_ranks
from runs import fit_in

COMMON = """\
data:
  train: records.jsonl
  validation: [{name: first, files: first.jsonl}, {name: others, files: others.jsonl}]
  sequence_length: 40
train: {global_batch: 8, steps: 60}
optim: {lr: 1.0e-2}
precision: fp32
device: cpu
tracking: {tensorboard: false}
"""
TASKS = {
    "sequence_classification": "model: bert, metrics: [accuracy, f1_macro]",
    "token_classification": "model: bert",
    "seq2seq": "model: t5, generation: {max_new_tokens: 5}",
    "masked_lm": "model: bert",
}
SIZES = {
    "bert": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
             "max_position_embeddings": 64},
    "t5": {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2},
}  # fmt: skip
WORDS = ["the", "load", "and", "an", "engine", "pulls", "along"]
RECORDS = 17
CASES = ((1, 1), (2, 3), (3, 1), (3, 64))
"""Processes, and rows of a forward."""
SCORES = {
    "sequence_classification": {"loss", "accuracy", "f1_macro"},
    "token_classification": {"loss", "entity_f1"},
    "seq2seq": {"loss", "bleu"},
    "masked_lm": {"loss", "perplexity"},
}


def write_records(folder: Path) -> None:
    lines = []
    for number in range(RECORDS):
        words = [WORDS[(number * step + step) % len(WORDS)] for step in range(1, 2 + number % 7)]
        tags = ["B-X" if word.startswith("e") else "O" for word in words]
        record = {"text": " ".join(words), "label": "xyz"[number % 3], "tokens": words, "tags": tags}
        lines.append(json.dumps({**record, "source": " ".join(words), "target": " ".join(reversed(words))}))
    for name, chosen in (("records", lines), ("first", lines[:6]), ("others", lines[6:])):
        (folder / f"{name}.jsonl").write_text("\n".join(chosen) + "\n")


@pytest.fixture(scope="module")
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of each task."""
    folder = tmp_path_factory.mktemp("exact")
    write_records(folder)
    for name in asked(request, "name"):
        options = TASKS[name]
        family = "t5" if "t5" in options else "bert"
        task = f"type: {name}, {options}, from_scratch: {json.dumps(SIZES[family])}"
        (folder / "config.yaml").write_text(
            f"run: {{name: {name}}}\ntask: {{{task}, tokenizer: {{train: byte_bpe, vocab_size: 280}}}}\n{COMMON}"
        )
        fit_in(folder, "eval.every=null")
        (folder / "config.yaml").rename(folder / f"{name}.yaml")
    return folder


def evaluate_here(folder: str, name: str, rows: int) -> tuple[dict[str, float], str]:
    """Scores and predictions, on one of several ranks."""
    with chdir(folder):
        config = drawbar.load_config(f"{name}.yaml", [f"eval.micro_batch={rows}"]).config
        scores = evaluate_run(config, None, "validation", "latest")
        predictions = Path("runs") / name / "eval" / "validation" / "predictions.jsonl"
        return scores, predictions.read_text() if predictions.exists() else ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TASKS)
def test_world_sizes_and_batch_sizes_agree(name: str, project: Path) -> None:
    expected, predictions = run_ranks(evaluate_here, 1, str(project), name, 64)[0]
    for world_size, rows in CASES:
        ranks = run_ranks(evaluate_here, world_size, str(project), name, rows)
        assert all(scores == ranks[0][0] for scores, _ in ranks)
        # a loss is the difference of a logit and of a sum that is as large: fp32 rounds it absolutely, however small
        assert ranks[0][0] == pytest.approx(expected, rel=1e-6, abs=5e-7), f"{world_size} processes, {rows} rows"
        assert ranks[0][1] == predictions, f"{world_size} processes, {rows} rows"
    assert {f"{source}{score}" for score in SCORES[name] for source in ("", "first/", "others/")} <= expected.keys()
    lines = [json.loads(line) for line in predictions.splitlines()]
    assert [line["id"] for line in lines] == ([] if name == "masked_lm" else list(range(RECORDS)))
    assert name == "masked_lm" or len({str(line["prediction"]) for line in lines}) > 1
