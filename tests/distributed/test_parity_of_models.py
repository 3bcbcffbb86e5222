"""Acceptance: strategies compute what one process computes for every architecture, and with accumulation, activation
checkpointing, packed rows, bf16 and adapters. All cases share two processes."""

import gc
import json
from contextlib import chdir
from pathlib import Path

import pytest
import torch

import drawbar
from drawbar.config.parallel_dims import ParallelDims
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.parity.cases import parse_case
from drawbar.parity.result import Result
from drawbar.parity.run import ParityRequest, make_reference, run_case
from drawbar.parity.workload import Workload
from drawbar.tasks.task_registry import task_class
from exhaustive import asked, evenly
from harness import run_ranks
from runs import fit_in
from tiny import CPU

pytestmark = pytest.mark.exhaustive

CONFIG = """\
task: {TASK, tokenizer: {train: byte_bpe, vocab_size: 280}}
data: {train: records.jsonl, sequence_length: 40}
train: {global_batch: 8, steps: 4}
optim: {lr: 1.0e-2, warmup: 2}
precision: fp32
device: cpu
tracking: {tensorboard: false}
"""
WORDS = ["the", "load", "and", "an", "engine", "pulls", "along"]

DECODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 8}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "gpt2": ("causal_lm", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "bert": ("masked_lm", {**DECODER, "max_position_embeddings": 64}),
    "roberta": ("sequence_classification", {**DECODER, "max_position_embeddings": 64}),
    "t5": ("seq2seq", {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}),
    "bart": ("seq2seq", BART),
    "glm": ("causal_lm", GROUPED),
    "mistral": ("causal_lm", GROUPED),
    "qwen3": ("causal_lm", GROUPED),
    "phi": ("causal_lm", DECODER),
    "gpt_neox": ("causal_lm", DECODER),
    "apertus": (
        "causal_lm",
        {**DECODER, "num_key_value_heads": 2, "hidden_act": "xielu"},
    ),  # whose activation function has parameters
}
AUTOTP = ["bert", "roberta", "bart", "mistral", "qwen3", "phi", "gpt_neox"]
"""Those that DeepSpeed's own tensor parallelism knows."""
STAGES = [f"deepspeed zero_stage={stage}" for stage in range(4)]
OFFLOADED = [f"deepspeed zero_stage={stage} offload=true" for stage in (1, 2, 3)]
PIPELINED = ["gpt2", "glm", "mistral", "qwen3", "phi", "gpt_neox"]
LLAMA = ["config.yaml"]
WIDTHS = ("hidden", "intermediate")
ACCUMULATED = [*LLAMA, "train.micro_batch=1"]
PACKED = [*LLAMA, "data.batching=packed"]
ADAPTED = [*LLAMA, "task.model=folder", "task.from_scratch=null", "task.tokenizer=folder", "lora.rank=4"]

JOBS: dict[str, tuple[list[str], list[str], str]] = {
    **{name: ([f"{name}.yaml"], ["tensor=2"], "fp32") for name in FAMILIES},
    **{f"{name} in stages": ([f"{name}.yaml"], ["pipeline=2"], "fp32") for name in PIPELINED},
    **{f"{name} by AutoTP": ([f"{name}.yaml"], ["deepspeed tensor=2"], "fp32") for name in AUTOTP},
    "deepspeed": (ACCUMULATED, [*STAGES, *OFFLOADED, "deepspeed tensor=2"], "fp32"),
    # its weights are bf16 as well, which larger steps make a larger difference of
    "deepspeed in bf16": (
        [*ACCUMULATED, "optim.lr=3.0e-3"],
        [*STAGES, "deepspeed zero_stage=1 offload=true", "deepspeed tensor=2"],
        "bf16",
    ),
    "deepspeed and packed": (PACKED, ["deepspeed zero_stage=3"], "fp32"),
    "deepspeed and adapters": (ADAPTED, STAGES, "fp32"),
    "deepspeed and checkpointing": (
        LLAMA,
        [
            "deepspeed zero_stage=3 activation_checkpointing=full",
            "deepspeed zero_stage=3 activation_checkpointing=selective",
            "deepspeed tensor=2 activation_checkpointing=full",
        ],
        "fp32",
    ),
    "accumulation": (ACCUMULATED, ["ddp", "zero1", "fsdp", "fsdp reshard=false", "tensor=2", "pipeline=2"], "fp32"),
    "full": (
        LLAMA,
        [f"{name} activation_checkpointing=full" for name in ("ddp", "fsdp", "tensor=2", "pipeline=2")],
        "fp32",
    ),
    "selective": (
        LLAMA,
        [f"{name} activation_checkpointing=selective" for name in ("fsdp", "tensor=2")],
        "fp32",
    ),
    "every second": (LLAMA, ["fsdp activation_checkpointing={every: 2}"], "fp32"),
    "packed": (PACKED, ["ddp", "fsdp", "tensor=2", "pipeline=2"], "fp32"),
    "bf16": (LLAMA, ["ddp", "zero1", "fsdp", "tensor=2", "pipeline=2"], "bf16"),
    "adapters": (ADAPTED, ["ddp", "zero1", "fsdp", "tensor=2", "pipeline=2"], "fp32"),
    # a rounding in fp32 may choose another code, of which larger steps make a larger difference
    "moments in 8 bits": (
        [*LLAMA, "optim.state_dtype=int8", "optim.lr=1.0e-3", *(f"task.from_scratch.{n}_size=64" for n in WIDTHS)],
        ["ddp", "zero1", "pipeline=2"],
        "fp32",
    ),
    "adapters with lengths": (
        [*ADAPTED, "lora.dora=true"],
        ["ddp", "zero1", "fsdp", "pipeline=2"],
        "fp32",
    ),
    "adapters on nf4": ([*ADAPTED, "lora.base=nf4"], ["ddp", "zero1"], "fp32"),
    "adapters on int8": ([*ADAPTED, "lora.base=int8"], ["ddp", "zero1"], "bf16"),
}
RARE = {
    *(FAMILIES.keys() - {*evenly(FAMILIES, 4)}),
    *(f"{name} in stages" for name in PIPELINED if name not in evenly(PIPELINED, 2)),
    *(f"{name} by AutoTP" for name in AUTOTP if name not in evenly(AUTOTP, 2)),
}
CASES = [
    pytest.param(job, case, marks=() if job not in RARE and case in evenly(cases, 3) else pytest.mark.exhaustive)
    for job, (_, cases, _) in JOBS.items()
    for case in cases
]


def write_project(folder: Path) -> None:
    lines = []
    for number in range(90):
        words = [WORDS[(number * step + step) % len(WORDS)] for step in range(1, 2 + number % 7)]
        record = {"text": " ".join(words), "label": "xyz"[number % 3]}
        lines.append(json.dumps({**record, "source": " ".join(words), "target": " ".join(reversed(words))}))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    models = {**FAMILIES, "llama": ("causal_lm", {**DECODER, "num_key_value_heads": 2, "tie_word_embeddings": True})}
    for name, (task, fields) in models.items():
        path = folder / ("config.yaml" if name == "llama" else f"{name}.yaml")
        path.write_text(CONFIG.replace("TASK", f"type: {task}, model: {name}, from_scratch: {json.dumps(fields)}"))


def compare_all(folder: str, wanted: dict[str, list[str]]) -> dict[tuple[str, str], Result]:
    """The cases of each job, on one of two ranks; the results are rank 0's."""
    place = RankInfo.from_environment()
    found: dict[tuple[str, str], Result] = {}
    with chdir(folder):
        for job, names in wanted.items():
            (file, *settings), _, precision = JOBS[job]
            config = drawbar.load_config(file, settings).config
            workload = Workload(config, task_class(config.task.type), steps=3).with_tokenizer_and_metadata()
            expected = make_reference(workload, CPU, precision) if place.is_rank0 else None
            for name in names:
                case = parse_case(name, config)
                with Distributed(place, CPU, 60, ParallelDims.of(case.parallel, place.world_size)) as world:
                    result = run_case(workload, case, world, expected, ParityRequest([case], precision))
                gc.freeze()  # what it imported and keeps: collecting garbage was a seventh of the time
                if result is not None:
                    found[job, name] = result
    return found


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Result]:
    from drawbar.commands.export_run import ExportFormat, export_run

    folder = tmp_path_factory.mktemp("parity")
    write_project(folder)
    torch.manual_seed(0)
    fit_in(folder, "run.name=base")
    with chdir(folder):
        export_run(
            drawbar.load_config("config.yaml", ["run.name=base"]).config, None, Path("folder"), "latest", ExportFormat()
        )
    wanted: dict[str, list[str]] = {}
    for job, case in asked(request, "job", "case"):
        wanted.setdefault(job, []).append(case)
    return run_ranks(compare_all, 2, str(folder), wanted, timeout=500)[0]


@pytest.mark.parametrize(("job", "case"), CASES)
def test_equal(results: dict[tuple[str, str], Result], job: str, case: str) -> None:
    result = results[job, case]
    assert result.name == case
    assert result.verdict == "equal", result
