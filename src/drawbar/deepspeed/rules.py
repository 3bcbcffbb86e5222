"""The rules about DeepSpeed: what it can't do, and the native strategy that can."""

from importlib.util import find_spec

from drawbar.config.rules.rule import Rule
from drawbar.config.schema.run_config import RunConfig
from drawbar.deepspeed.settings import (
    HOST,
    NOWHERE,
    DeepSpeedSection,
    is_deepspeed,
    offload_optimizer,
    offload_parameters,
    offloads,
    stage_of,
    zero_stage,
)


def _preset(config: RunConfig) -> str | None:
    return DeepSpeedSection.of(config).preset


def _stage(config: RunConfig) -> int:
    """The ZeRO stage; -1 for a run of another strategy, to which no rule about stages applies."""
    return zero_stage(config) if is_deepspeed(config) else -1


def _places(config: RunConfig) -> tuple[str, str]:
    """Where optimizer state and parameters lie."""
    return offload_optimizer(config), offload_parameters(config)


SETTINGS = (
    Rule(
        "settings of deepspeed",
        ("parallel.strategy", "deepspeed"),
        lambda c: DeepSpeedSection.find(c) is not None and not is_deepspeed(c),
        "only the strategy deepspeed reads the section deepspeed",
        "set parallel.strategy=deepspeed, or deepspeed=null",
    ),
    Rule(
        "preset and stage",
        ("deepspeed.preset", "parallel.zero_stage"),
        lambda c: (preset := _preset(c)) is not None and c.parallel.zero_stage not in (None, stage_of(preset)),
        "they name two ZeRO stages",
        "remove parallel.zero_stage, or choose the preset of that stage",
    ),
    Rule(
        "preset and offload",
        ("deepspeed.preset", "parallel.offload"),
        lambda c: (preset := _preset(c)) is not None and c.parallel.offload and not preset.endswith("_offload"),
        "the preset is one that keeps everything on the device",
        "remove parallel.offload, or set deepspeed.preset=zero2_offload or zero3_offload",
    ),
    Rule(
        "offload and none",
        ("deepspeed.preset", "parallel.offload", "deepspeed.offload_optimizer"),
        lambda c: is_deepspeed(c) and offloads(c) and DeepSpeedSection.of(c).offload_optimizer == NOWHERE,
        "one says to offload the optimizer, and the other not to",
        "remove deepspeed.offload_optimizer; to offload parameters alone set deepspeed.offload_parameters=cpu instead",
    ),
    Rule(
        "offloaded parameters below stage 3",
        ("parallel.zero_stage", "deepspeed.offload_parameters"),
        lambda c: 0 <= _stage(c) < 3 and DeepSpeedSection.of(c).offload_parameters not in (None, NOWHERE),
        "only ZeRO stage 3 can keep parameters in host memory or on a disk",
        "set parallel.zero_stage=3, or remove deepspeed.offload_parameters",
    ),
    Rule(
        "offload of stage 0",
        ("parallel.zero_stage", "parallel.offload", "deepspeed"),
        lambda c: _stage(c) == 0 and _places(c) != (NOWHERE, NOWHERE),
        "DeepSpeed offloads what is sharded, and stage 0 shards nothing",
        "set parallel.zero_stage=1, 2 or 3",
    ),
    Rule(
        "offload to disk below stage 3",
        ("parallel.zero_stage", "deepspeed.offload_optimizer"),
        lambda c: 0 < _stage(c) < 3 and offload_optimizer(c) not in (NOWHERE, HOST),
        "only ZeRO stage 3 writes to disk; the others would keep the state in host memory",
        "set parallel.zero_stage=3, or deepspeed.offload_optimizer=cpu",
    ),
)

LIMITS = (
    Rule(
        "zero stage of a pipeline",
        ("parallel.pipeline", "parallel.zero_stage", "deepspeed.preset"),
        lambda c: _stage(c) > 1 and c.parallel.pipeline > 1,
        "DeepSpeed's pipeline takes ZeRO stages 0 and 1 alone: its stages add up gradients of many micro-batches",
        "set parallel.zero_stage=1, or shard more with parallel.strategy=fsdp and the same pipeline",
    ),
    Rule(
        "tensor with stage 3",
        ("parallel.tensor", "parallel.zero_stage", "deepspeed.preset"),
        lambda c: _stage(c) == 3 and c.parallel.tensor > 1,
        "both cut the same matrices, and DeepSpeed cannot read or set a whole matrix that is cut twice",
        "set parallel.zero_stage=2; or keep parallel.tensor with parallel.strategy=fsdp, which can cut matrices twice",
    ),
    Rule(
        "deepspeed tensor with adapters",
        ("parallel.strategy", "parallel.tensor", "lora"),
        lambda c: is_deepspeed(c) and c.parallel.tensor > 1 and c.parallel.pipeline == 1 and c.lora is not None,
        "DeepSpeed's tensor parallelism puts layers of its own in the places of those that have adapters",
        "keep parallel.tensor and set parallel.strategy=fsdp or ddp, or set parallel.tensor=1",
    ),
    Rule(
        "fp16 with stage 0",
        ("precision", "parallel.zero_stage"),
        lambda c: _stage(c) == 0 and c.precision == "fp16",
        "DeepSpeed's stage 0 adds fp16 gradients up in fp16, and counts those of split parameters wrongly in the norm",
        "set parallel.zero_stage=1, or precision=bf16",
    ),
    Rule(
        "deepspeed in fp16 on CPUs",
        ("parallel.strategy", "precision", "device"),
        lambda c: is_deepspeed(c) and c.precision == "fp16" and c.device == "cpu",
        "DeepSpeed knows no CPU that computes in fp16",
        "set precision=bf16, or device=cuda",
    ),
    Rule(
        "deepspeed with other schedules",
        ("parallel.strategy", "parallel.schedule"),
        lambda c: is_deepspeed(c) and c.parallel.schedule != "1f1b",
        "DeepSpeed's pipeline has one schedule, 1f1b",
        "set parallel.schedule=1f1b, or parallel.strategy=fsdp or ddp with this schedule",
    ),
    Rule(
        "deepspeed with sequence",
        ("parallel.strategy", "parallel.sequence"),
        lambda c: is_deepspeed(c) and c.parallel.sequence,
        "DeepSpeed's tensor parallelism leaves the activations whole",
        "remove parallel.sequence, or keep parallel.tensor and set parallel.strategy=fsdp",
    ),
    Rule(
        "deepspeed with context",
        ("parallel.strategy", "parallel.context"),
        lambda c: is_deepspeed(c) and c.parallel.context > 1,
        "DeepSpeed does not cut sequences over ranks",
        "keep parallel.context and set parallel.strategy=fsdp or ddp, or set parallel.context=1",
    ),
    Rule(
        "muon with deepspeed",
        ("optim.name", "parallel.strategy"),
        lambda c: is_deepspeed(c) and c.optim.name == "muon",
        "muon is two optimizers, and one needs whole matrices; DeepSpeed runs one optimizer, on flat buffers",
        "set optim.name=adamw, or parallel.strategy=fsdp",
    ),
    Rule(
        "ema with deepspeed",
        ("optim.ema", "parallel.strategy"),
        lambda c: is_deepspeed(c) and c.optim.ema is not None,
        "DeepSpeed keeps the weights itself, and other ones while it evaluates are not possible",
        "remove optim.ema, or set parallel.strategy=zero1 or fsdp",
    ),
    Rule(
        "other optimizers with deepspeed",
        ("optim.name", "parallel.strategy"),
        lambda c: is_deepspeed(c) and ":" in c.optim.name,
        "DeepSpeed's ZeRO was tested with few optimizers, and is here only with adamw and sgd",
        "set optim.name=adamw, or parallel.strategy=zero1 or fsdp",
    ),
    Rule(
        "state_dtype with deepspeed",
        ("optim.state_dtype", "parallel.strategy"),
        lambda c: is_deepspeed(c) and c.optim.state_dtype != "fp32",
        "DeepSpeed keeps the optimizer's state itself",
        "remove optim.state_dtype, or set parallel.strategy=zero1 or fsdp",
    ),
    Rule(
        "adafactor with deepspeed",
        ("optim.name", "parallel.strategy"),
        lambda c: is_deepspeed(c) and c.optim.name == "adafactor",
        "Adafactor keeps another state of a matrix than of a vector, and ZeRO flattens both",
        "set optim.name=adamw, or parallel.strategy=zero1 or ddp",
    ),
    Rule(
        "deepspeed on mps",
        ("parallel.strategy", "device"),
        lambda c: is_deepspeed(c) and c.device == "mps",
        "Apple's MPS is one device, and there is nothing for DeepSpeed to shard over",
        "set parallel.strategy=single, or device=cpu",
    ),
    Rule(
        "compile with stage 3",
        ("parallel.compile", "parallel.zero_stage", "deepspeed.preset"),
        lambda c: _stage(c) == 3 and c.parallel.compile,
        "stage 3 gathers parameters inside of blocks, so torch compiles each block again, and gives up after eight",
        "set parallel.compile=false, or parallel.strategy=fsdp, which gathers outside of what is compiled",
    ),
)

RULES: tuple[Rule, ...] = SETTINGS + LIMITS

INSTALL = "DS_BUILD_OPS=0 pip install --no-build-isolation 'drawbar[deepspeed]'"
"""Its build asks torch, which must be there."""
PACKAGE_RULES = (
    Rule(
        "deepspeed without its package",
        ("parallel.strategy", "deepspeed"),
        lambda c: is_deepspeed(c) and find_spec("deepspeed") is None,
        "it needs the package deepspeed, which is not installed",
        f"{INSTALL}, or set parallel.strategy=fsdp and leave the section deepspeed out",
    ),
)
