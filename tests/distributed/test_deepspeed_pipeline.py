"""DeepSpeed's pipeline, with tensor and data parallelism: it computes what one process computes."""

import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch

import drawbar
from drawbar.config.parallel_dims import ParallelDims
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.parity.cases import parse_case
from drawbar.parity.result import Result
from drawbar.parity.run import ParityRequest, make_reference, run_case
from drawbar.parity.workload import Workload
from drawbar.tasks.task_registry import task_class
from harness import run_ranks
from runs import fit_in, largest_difference, losses, scores, weights
from tiny import CPU

STEPS = 3
FIELDS = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4"
MODELS = {
    "tied llama": f"{{model: llama, from_scratch: {{{FIELDS}, num_key_value_heads: 2, tie_word_embeddings: true}}",
    "mistral": f"{{model: mistral, from_scratch: {{{FIELDS}, num_key_value_heads: 2, head_dim: 8}}",
    "phi": f"{{model: phi, from_scratch: {{{FIELDS}}}",
    "gpt_neox": f"{{model: gpt_neox, from_scratch: {{{FIELDS}}}",
    "gpt2": "{model: gpt2, from_scratch: {n_embd: 32, n_layer: 2, n_head: 4}",
}
CONFIG = """\
run: {{name: tiny}}
task: {task}, tokenizer: {{train: byte_bpe, vocab_size: 301}}}}
data: {{train: train.txt, sequence_length: 32}}
train: {{global_batch: 8, micro_batch: 1, steps: 12, gradient_clip: 0.5}}
optim: {{lr: 1.0e-3}}
precision: fp32
device: cpu
"""
Cases = list[tuple[str, list[str], str, str]]
"""(model, settings, precision, case)"""
TOKENS = ["train.micro_batch=auto", "train.micro_batch_tokens=64"]
"""Another number of micro-batches in each step."""
TWO: Cases = [
    ("tied llama", [], "fp32", "deepspeed pipeline=2"),
    ("tied llama", [], "bf16", "deepspeed pipeline=2"),
    ("tied llama", [], "bf16", "deepspeed pipeline=2 zero_stage=0"),
    ("tied llama", [], "bf16", "deepspeed pipeline=2 offload=true"),
    ("gpt_neox", [], "fp32", "deepspeed pipeline=2 zero_stage=0"),
    ("mistral", TOKENS, "fp32", "deepspeed pipeline=2 activation_checkpointing=full"),
    ("gpt2", ["data.batching=packed"], "fp32", "deepspeed pipeline=2"),
]
FOUR: Cases = [
    ("tied llama", [], "fp32", "deepspeed pipeline=2"),
    ("tied llama", [], "fp32", "deepspeed pipeline=2 tensor=2 zero_stage=0"),
    ("gpt_neox", [], "fp32", "deepspeed pipeline=2 tensor=2"),
    ("phi", [], "fp32", "deepspeed pipeline=2 tensor=2"),
    ("gpt2", [], "fp32", "deepspeed pipeline=2 tensor=2"),
]


def compare(folder: str, cases: Cases) -> list[Result | str]:
    """On one rank: what came of each case, or the error that refused it; on rank 0."""
    place = RankInfo.from_environment()
    results: list[Result | str | None] = []
    expected = {}
    with chdir(folder):
        for model, settings, precision, name in cases:
            config = drawbar.load_config(f"{model}.yaml", settings).config
            workload = Workload(config, task_class(config.task.type), STEPS).with_tokenizer_and_metadata()
            kind = (model, precision, *settings)
            if place.is_rank0 and kind not in expected:
                expected[kind] = make_reference(workload, CPU, precision)
            case = parse_case(name, config)
            with Distributed(place, CPU, 60, ParallelDims.of(case.parallel, place.world_size)) as world:
                try:
                    results.append(
                        run_case(workload, case, world, expected.get(kind), ParityRequest([case], precision))
                    )
                except UserError as error:
                    results.append(str(error) if place.is_rank0 else None)
    return [result for result in results if result is not None]


@pytest.fixture
def folder(project: Path) -> Path:
    for name, task in MODELS.items():
        (project / f"{name}.yaml").write_text(CONFIG.format(task=task))
    return project


def check_equal(results: list[Result | str], cases: Cases) -> None:
    assert len(results) == len(cases)
    for case, result in zip(cases, results, strict=True):
        assert isinstance(result, Result), (case, result)
        assert result.verdict == "equal", (case, result)


@pytest.mark.exhaustive
def test_stages_compute_what_one_process_computes(folder: Path) -> None:
    check_equal(run_ranks(compare, 2, str(folder), TWO, timeout=400)[0], TWO)


@pytest.mark.exhaustive
def test_so_do_stages_whose_layers_are_cut(folder: Path) -> None:
    *results, refused = run_ranks(compare, 4, str(folder), FOUR, timeout=400)[0]
    check_equal(results, FOUR[:-1])
    assert "c_attn" in refused
    assert "parallel.strategy=ddp with parallel.tensor=2" in refused


DEEPSPEED = ["parallel.strategy=deepspeed", "parallel.pipeline=2", "parallel.tensor=2"]


def train_both(folder: str) -> None:
    """From the first step, and from the middle of another's run."""
    for name in ("staged", "alone-staged"):
        fit_in(Path(folder), *DEEPSPEED, "checkpoint.every=6", f"run.name={name}")


def copy_half(runs: Path, name: str, copy: str) -> None:
    """A run as it was after six steps."""
    shutil.copytree(runs / name, runs / copy)
    shutil.rmtree(runs / copy / "checkpoints" / "step-00000012")


@pytest.mark.exhaustive
def test_its_checkpoints_are_everybodys(project: Path) -> None:
    runs = project / "runs"
    fit_in(project, "checkpoint.every=6", "run.name=alone")
    copy_half(runs, "alone", "alone-staged")
    run_ranks(train_both, 4, str(project))
    copy_half(runs, "staged", "staged-alone")
    fit_in(project, "checkpoint.every=6", "run.name=staged-alone")
    for name in ("staged", "alone-staged", "staged-alone"):
        assert largest_difference(losses(runs / "alone"), losses(runs / name)) <= 1e-5
        found = weights(runs / name, 12)
        for key, tensor in weights(runs / "alone", 12).items():
            assert torch.linalg.norm(found[key] - tensor) <= 1e-4 * torch.linalg.norm(tensor), (name, key)
        for step, score in scores(runs / "alone").items():
            assert scores(runs / name)[step] == pytest.approx(score, rel=1e-4)
