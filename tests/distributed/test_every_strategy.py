"""Acceptance: a run under any strategy is the run of one process, and goes on exactly after a stop.

Every case trains four steps with checkpoints at 2 and 4, then goes on from a copy of step 2; it evaluates with text
that the model writes. All cases of a world size share the processes.
"""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import drawbar
from exhaustive import asked, params
from harness import run_ranks
from runs import fit_in, largest_difference, losses, scores, weights

CONFIG = """\
run: {name: one}
task:
  model: llama
  from_scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
                 num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}
  tokenizer: {train: byte_bpe, vocab_size: 300}
  prompt_column: source
  completion_column: target
  label_smoothing: 0.1
  z_loss: 1.0e-3
  generation: {max_new_tokens: 3}
data: {train: records.jsonl, validation: valid.jsonl, sequence_length: 48}
train: {global_batch: 8, micro_batch: 2, steps: 4}
optim:
  lr: 5.0e-2
  warmup: 1
  layer_lr_decay: 0.9
  groups: [{match: norm, lr: 1.0e-2}, {match: o_proj, weight_decay: 0.5}, {match: layers.1.mlp.down, frozen: true}]
precision: fp32
device: cpu
eval: {every: 2}
checkpoint: {every: 2}
tracking: {log_every: 1, tensorboard: false}
"""
WORDS = ["the", "load", "and", "an", "engine", "pulls", "along"]
TWO = {
    "ddp": ["strategy=ddp"],
    "zero1": ["strategy=zero1"],
    "fsdp": ["strategy=fsdp"],
    "fsdp without reshard": ["strategy=fsdp", "reshard=false"],
    "fsdp with offload": ["strategy=fsdp", "offload=true"],
    "tensor": ["tensor=2"],
    "gpipe": ["pipeline=2", "schedule=gpipe"],
    "1f1b": ["pipeline=2"],
    "interleaved": ["pipeline=2", "schedule=interleaved"],
    **{f"deepspeed {stage}": ["strategy=deepspeed", f"zero_stage={stage}"] for stage in range(4)},
    "deepspeed 2 with offload": ["strategy=deepspeed", "zero_stage=2", "offload=true"],
    "deepspeed 3 with offload": ["strategy=deepspeed", "zero_stage=3", "offload=true"],
    "deepspeed and tensor": ["strategy=deepspeed", "zero_stage=1", "tensor=2"],
}
FOUR = {
    "fsdp with replicas": ["strategy=fsdp", "replicate=2"],
    "tensor and fsdp": ["strategy=fsdp", "tensor=2"],
    "tensor and ddp": ["strategy=ddp", "tensor=2"],
    "pipeline and ddp": ["strategy=ddp", "pipeline=2"],
    "pipeline and fsdp": ["strategy=fsdp", "pipeline=2"],
    "pipeline and tensor": ["pipeline=2", "tensor=2"],
}
OFTEN = {"ddp", "fsdp", "tensor", "1f1b", "deepspeed 3"}
OFTEN_OF_FOUR = {"tensor and fsdp"}
CASES = params(
    [(2, name) for name in TWO] + [(4, name) for name in FOUR],
    [(2, name) for name in OFTEN] + [(4, name) for name in OFTEN_OF_FOUR],
)
FOUR_BLOCKS = "task.from_scratch.num_hidden_layers=4"
"""For the interleaved schedule, of which each rank has two stages; two blocks are quicker."""


def write_records(path: Path, first: int, count: int) -> None:
    lines = []
    for number in range(first, first + count):
        words = [WORDS[(number * step + step) % len(WORDS)] for step in range(1, 3 + number % 4)]
        lines.append(json.dumps({"source": " ".join(words), "target": " ".join(reversed(words))}))
    path.write_text("\n".join(lines) + "\n")


def train_all(folder: str, cases: dict[str, list[str]]) -> list[str]:
    """Every case twice: through, and from its checkpoint at step 2. Returns what Python warned of."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        _train_all(folder, cases)
    return [str(warning.message) for warning in heard]


def _train_all(folder: str, cases: dict[str, list[str]]) -> None:
    torch.manual_seed(0)
    first = drawbar.distributed.rank_info.RankInfo.from_environment().is_rank0
    for name, settings in cases.items():
        parallel = [f"parallel.{setting}" for setting in settings] + [FOUR_BLOCKS] * (name == "interleaved")
        runs = Path(folder) / "runs"
        whole, resumed = name.replace(" ", "-"), name.replace(" ", "-") + "-resumed"
        fit_in(Path(folder), *parallel, f"run.name={whole}")
        if first:
            shutil.copytree(runs / whole, runs / resumed)
            shutil.rmtree(runs / resumed / "checkpoints" / "step-00000004")
            (runs / resumed / "checkpoints" / "best.json").unlink(missing_ok=True)
        fit_in(Path(folder), *parallel, f"run.name={resumed}")


@pytest.fixture(scope="module")
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference runs, with an evaluation, and those of all cases."""
    folder = tmp_path_factory.mktemp("strategies")
    write_records(folder / "records.jsonl", 0, 41)
    write_records(folder / "valid.jsonl", 100, 7)
    (folder / "config.yaml").write_text(CONFIG)
    for reference in (["run.name=one"], ["run.name=interleaved-one", FOUR_BLOCKS]):
        fit_in(folder, *reference)
    names = asked(request, "name")
    for ranks, known in ((2, TWO), (4, FOUR)):
        cases = {name: known[name] for name in names if name in known}
        heard = run_ranks(train_all, ranks, str(folder), cases, timeout=500)
        assert not [text for rank in heard for text in rank if "FSDP2-wrapped module" in text]
    return folder / "runs"


def runs_of(project: Path, name: str) -> tuple[Path, Path]:
    """That of one process, and that of the case."""
    return project / ("interleaved-one" if name == "interleaved" else "one"), project / name.replace(" ", "-")


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_losses_and_weights_are_those_of_one_process(project: Path, ranks: int, name: str) -> None:
    one, run = runs_of(project, name)
    reference = losses(one)
    assert max(reference.values()) > 1.2 * min(reference.values())  # it learned: equal traces are no accident
    assert largest_difference(reference, losses(run)) <= 1e-5
    wanted, found = weights(one, 4), weights(run, 4)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.linalg.norm(found[key] - tensor) <= 1e-4 * torch.linalg.norm(tensor), key


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_a_resumed_run_is_the_same_run(project: Path, ranks: int, name: str) -> None:
    _, run = runs_of(project, name)
    resumed = run.with_name(f"{run.name}-resumed")
    assert losses(resumed) == losses(run)
    assert scores(resumed) == scores(run)
    wanted, found = weights(run, 4), weights(resumed, 4)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_scores_and_texts_are_those_of_one_process(project: Path, ranks: int, name: str) -> None:
    one, run = runs_of(project, name)
    for step, wanted in scores(one).items():
        assert scores(run)[step] == pytest.approx(wanted, rel=1e-4)
    wanted_texts, texts = ((folder / "eval" / "validation" / "predictions.jsonl").read_text() for folder in (one, run))
    assert "prediction" in wanted_texts
    assert texts == wanted_texts
