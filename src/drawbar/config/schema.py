"""The whole ``RunConfig`` tree: every setting, its type, its default, and what it means.

The text below a field is its documentation: ``drawbar config explain`` prints it and ``docs/configuration.md`` is
generated from it. The models are strict (no silent conversions), closed (an unknown key is an error) and frozen.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SerializeAsAny, create_model


def expand_path(text: str) -> str:
    """``~`` and ``${NAME}`` written out. Raises ValueError for a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set")
        return os.environ[name]

    expanded = re.sub(r"\$\{(\w+)\}", value, text)
    return str(Path(expanded).expanduser()) if expanded.startswith("~") else expanded


PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_path)]
"""A path, or a name that may be one; ``~`` and ``${NAME}`` are expanded when the configuration is read."""

Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """One section of the configuration: strict, closed and frozen."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        use_attribute_docstrings=True,
    )


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)] = "run"
    """Name of the run; its directory is `<run.dir>/<run.name>`."""
    dir: PathText = "runs"
    """Folder that holds the run directories."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights, the dropout and the order of the data."""
    deterministic: bool = False
    """Use only deterministic GPU kernels (slower); a CPU run is deterministic anyway."""


class TaskConfig(Section):
    """Options of a task. A task's own `Config` subclasses this; each field is a key under `task:`."""

    type: Annotated[str, Field(min_length=1)] = "causal_lm"
    """A built-in task (`causal_lm`), or your own class as `package.module:Class`."""


class TokenizerTraining(Section):
    train: Literal["byte_bpe"]
    """Train a new tokenizer on the training data: byte-level BPE, so any text can be encoded."""
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    """Number of tokens, the 256 bytes and the end-of-text token included."""


class CausalLMConfig(TaskConfig):
    """Options of the built-in task `causal_lm`: predict the next token."""

    model: PathText = "llama"
    """Hub name or folder of a pretrained model; with `from_scratch`, also a model type such as `llama` or `gpt2`."""
    from_scratch: dict[str, Any] | None = None
    """Start from random weights, with these fields of the architecture's own config changed (`{}`: none)."""
    tokenizer: PathText | TokenizerTraining | None = None
    """Hub name or folder of the tokenizer (default: the model's own), or `{train: byte_bpe, vocab_size: N}`."""
    resize_embeddings: bool = False
    """Grow or shrink the model's embeddings to the tokenizer's size. Without it, one that does not fit is an error."""
    text_column: Annotated[str, Field(min_length=1)] = "text"
    """The key that holds the text of a JSON record."""


class DataSection(Section):
    train: PathText | list[PathText] | None = None
    """Training data: a file, a glob, a list of them (`.txt`, `.jsonl`), or a built-in source (`python_stdlib`)."""
    validation: PathText | list[PathText] | None = None
    """Validation data, in the same forms."""
    test: PathText | list[PathText] | None = None
    """Test data, in the same forms; only `drawbar eval --split test` reads it."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What one record of a `.txt` file is: a line, a paragraph (up to a blank line) or the whole file."""
    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Longest sample, in tokens. Longer documents are split for language modelling."""
    packing: bool = False
    """Fill each row with several samples; attention and positions never cross from one into another."""
    shuffle: bool = True
    """Visit the training samples in a new random order every epoch."""


class TrainSection(Section):
    global_batch: Count = 32
    """Rows (samples, or packs of samples) in one optimizer step, over all processes and accumulation."""
    micro_batch: Count | Auto = "auto"
    """Rows in one forward and backward on one process. It changes speed and memory, never the result."""
    steps: Count | None = None
    """Train for this many optimizer steps. Give `steps` or `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Train for this many passes over the data (fractions are allowed)."""
    gradient_clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; `null` for no clipping."""


class OptimSection(Section):
    name: Literal["adamw", "sgd", "adafactor", "muon"] = "adamw"
    """The optimizer. `muon` is for matrices inside the model; embeddings, norms and biases get AdamW."""
    lr: Annotated[float, Field(ge=0)] = 3.0e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay; never applied to biases and norms."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: Annotated[float, Field(gt=0)] = 1.0e-8
    """AdamW's epsilon."""
    momentum: Fraction | None = None
    """Momentum of `sgd` (default 0) and `muon` (default 0.95)."""
    schedule: Literal["linear", "cosine", "constant", "polynomial", "inverse_sqrt", "wsd"] = "linear"
    """How the learning rate goes on after the warm-up; `wsd` is warm-up, stable, decay."""
    warmup: Annotated[int, Field(ge=0)] | Fraction = 0
    """Warm-up: a number of steps (`500`), or a fraction of all steps (`0.05`)."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where `linear`, `cosine`, `polynomial` and `wsd` end, as a share of the peak learning rate."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of all steps that `wsd` spends decaying."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`."""


class ParallelSection(Section):
    strategy: Literal["auto", "single", "dp", "ddp", "zero1", "fsdp", "deepspeed"] = "auto"
    """How parameters, gradients and optimizer state are laid out. `auto`: one process, or `ddp`."""
    tensor: Count = 1
    """Tensor-parallel degree."""
    pipeline: Count = 1
    """Pipeline-parallel degree."""
    context: Count = 1
    """Context-parallel degree."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """Recompute activations in the backward pass instead of keeping them."""
    reshard: bool | None = None
    """fsdp: free gathered parameters after the forward pass (ZeRO-3) or keep them (ZeRO-2)."""
    replicate: Count = 1
    """fsdp: number of replicas of the sharded model (hybrid sharding)."""
    offload: bool = False
    """fsdp, deepspeed: keep parameters and optimizer state in host memory."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """deepspeed: ZeRO stage."""


class EvalSection(Section):
    every: Count | None = None
    """Evaluate on the validation data every so many steps; it is always evaluated at the end."""
    at_start: bool = False
    """Evaluate before the first step as well."""
    metric: Annotated[str, Field(min_length=1)] = "loss"
    """The score that decides which checkpoint is the best."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger score is better. A tie keeps the first."""
    patience: Count | None = None
    """Stop after this many evaluations in a row without a better score."""
    micro_batch: Count | None = None
    """Rows in one evaluation forward (default: as in training)."""


class CheckpointSection(Section):
    every: Count | None = 500
    """Save every so many steps; a run always saves at its end, and when it is told to stop."""
    keep: Count = 3
    """How many of the newest checkpoints to keep."""
    keep_best: bool = True
    """Save whenever the evaluation finds a better score, and keep the best one besides."""


class WandbSection(Section):
    project: Annotated[str, Field(min_length=1)]
    """Project that the run belongs to."""
    mode: Literal["online", "offline"] = "online"
    """Send as the run goes, or keep the files for `wandb sync`."""


class ProfileSection(Section):
    start: Count
    """First step to profile."""
    steps: Count = 1
    """How many steps to profile."""


class TrackingSection(Section):
    log_every: Count = 10
    """Write metrics every so many steps."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: WandbSection | None = None
    """Track the run with Weights & Biases."""
    profile: ProfileSection | None = None
    """Record a torch.profiler trace of these steps in `<run>/profile/`."""


class LaunchSection(Section):
    nproc: Count | Auto = "auto"
    """Processes to start on this machine; `auto`: one for each GPU, or one. `torchrun` overrules it."""
    timeout: Annotated[int, Field(ge=10)] = 600
    """Seconds that a process waits for the others before it gives up and says whom it waited for."""


class RunConfig(Section):
    """A whole run. Every section can be left out; every default is written to the run's `config.yaml`."""

    run: RunSection = RunSection()
    task: SerializeAsAny[TaskConfig] = CausalLMConfig()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Number format of the matrix products. Weights stay in fp32. `auto`: bf16 where the hardware is faster at it."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """What to run on. `auto`: CUDA, else Apple's MPS (one process), else the CPU."""
    parallel: ParallelSection = ParallelSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    launch: LaunchSection = LaunchSection()

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name


@cache
def run_config_type(task_config: type[TaskConfig]) -> type[RunConfig]:
    """``RunConfig`` whose ``task`` section is this task's own ``Config``."""
    return create_model("RunConfig", __base__=RunConfig, task=(task_config, Field(default_factory=task_config)))


BUILT_IN_TASKS: dict[str, type[TaskConfig]] = {"causal_lm": CausalLMConfig}
"""The options of each built-in task; they live here so that `drawbar config` need not import torch."""
