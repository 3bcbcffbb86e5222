"""The complete ``RunConfig`` tree: every setting, its type, its default, and what it means.

The docstring of a field is its documentation: ``drawbar config explain`` prints it, and ``docs/configuration.md`` is
generated from it. The models are strict (no silent conversions), closed (an unknown key is an error) and frozen.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, Field, SerializeAsAny, ValidationError, create_model, field_validator
from pydantic_core import PydanticCustomError, PydanticSerializationError

from drawbar.config.schema.data_section import DataSection
from drawbar.config.schema.guest_section import GuestSection, guest_sections
from drawbar.config.schema.section import (
    Auto,
    Count,
    Fraction,
    Interval,
    PathText,
    Seconds,
    Section,
    Text,
    check_store_url,
    refuse_secrets,
    text_of,
)
from drawbar.config.schema.task_sections import BUILT_IN_TASKS, CausalLMConfig, TaskConfig
from drawbar.config.strategies import AUTO, STRATEGIES, Strategy, find_strategy
from drawbar.errors import UserError


def check_stored(options: BaseModel) -> None:
    """Check that every option survives a round trip through ``config.yaml``.

    Raises:
        ValueError: an option does not; the message names it.
    """
    stored: dict[str, Any] = {}
    for name in (*type(options).model_fields, *type(options).model_computed_fields):
        stored |= _stored(options, name)
    try:
        read = type(options).model_validate_json(json.dumps(stored))
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        name = str(found["loc"][0]) if found["loc"] else type(options).__name__
        raise ValueError(_not_the_same(options, name, f"is refused when it is read: {found['msg']}")) from error
    for name in type(options).model_fields:
        again = getattr(read, name)
        if not _equal(again, getattr(options, name)):
            raise ValueError(_not_the_same(options, name, f"is read back as {again!r:.60}"))


def _stored(options: BaseModel, name: str) -> dict[str, Any]:
    """The option by name, as stored in ``config.yaml``; empty if the class excludes the field from dumps."""
    try:
        return options.model_dump(mode="json", include={name}, warnings=False)
    except PydanticSerializationError as error:
        value = getattr(options, name)
        raise ValueError(
            f"the option {name} is {value!r:.60}, of type {type(value).__name__}, which the run's config.yaml "
            "cannot store; use a string, a number, a list or a mapping, and create the object from it in the task"
        ) from error


def _not_the_same(options: BaseModel, name: str, what: str) -> str:
    value, remedy = "", "make it a plain property"
    if name in type(options).model_fields:
        value = f" is {getattr(options, name)!r:.60}, which"
        remedy = "give it the type that its value has, as in `str | None`"
    return f"the option {name}{value} is written to the run's config.yaml and {what}; {remedy}"


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - such as arrays, which have no single answer
        return False


RUN_NAME = "letters, digits, dots, dashes and underscores (first a letter, a digit or an underscore)"


class RunSection(Section):
    name: Annotated[str, text_of(RUN_NAME, r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)] = "run"
    """Name of the run; its directory is `<run.dir>/<run.name>`."""
    dir: PathText = "runs"
    """Folder for run directories."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed of the weights, the dropout and the data order."""
    deterministic: bool = False
    """Use only deterministic GPU kernels (slower). CPU runs are always deterministic."""


class TrainSection(Section):
    global_batch: Count = 32
    """Rows (samples, or packs of samples) per optimizer step, over all processes and accumulation steps."""
    micro_batch: Count | Auto = "auto"
    """Rows per forward and backward pass of one process. Affects speed and memory, never the result. `auto`: as many as
    8,192 tokens allow; on CUDA, as many as fit into memory, found by trial steps before training and saved in the run
    directory, but at most 8,192 tokens if batches are padded (`data.batching: padded`, not padding-free). `dp`,
    `deepspeed`, pipelines and streaming make no trial steps."""
    micro_batch_tokens: Count | None = None
    """Instead of `micro_batch`: maximum number of tokens, including padding, per forward and backward pass of one
    process."""
    steps: Count | None = None
    """Number of optimizer steps to train for. Give `steps` or `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Number of passes over the data to train for; may be fractional."""
    gradient_clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum global gradient norm; `null` disables clipping."""
    on_spike: Literal["warn", "skip", "rewind", "stop"] = "warn"
    """What to do if the loss or gradient norm of a step is far above that of the steps before it. Only `warn` makes the
    update. `skip` leaves it out, and goes on; `rewind` goes back to the newest checkpoint, and on with the samples
    after this step; `stop` saves, and ends. These three also hold for values that are not finite; with more than ten
    spikes in 100 steps, the run ends."""
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    """How far above the median of the last 100 steps a spike is, in robust standard deviations of the logarithm."""


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from error
    return text


RegularExpression = Annotated[str, AfterValidator(_regular_expression)]


class ParameterGroup(Section):
    """Settings for the parameters whose names match; what is not set is as for the others."""

    match: RegularExpression
    """A regular expression, found anywhere in the name: `lm_head`, `layers\\.[0-3]\\.`."""
    lr: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate, without `optim.layer_lr_decay`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; never applied to biases and norms."""
    frozen: bool = False
    """Do not train these parameters."""


OwnName = Annotated[str, text_of("the form package.module:name", r"^[\w.]+:\w+$")]
"""Something of a user's or of a library's."""


class OptimSection(Section):
    name: Literal["adamw", "sgd", "adafactor", "muon"] | OwnName = "adamw"
    """The optimizer. `muon` updates the matrices inside the model; embeddings, norms and biases use AdamW. Any other
    class, such as `torch.optim:RAdam`, is called with the parameter groups, `lr` and `optim.options`."""
    lr: Annotated[float, Field(ge=0)] = 3.0e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay (`sgd` adds it to the gradient); never applied to biases and norms."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: Annotated[float, Field(gt=0)] = 1.0e-8
    """AdamW's epsilon."""
    momentum: Fraction | None = None
    """Momentum of `sgd` (default 0) and `muon` (default 0.95)."""
    muon_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of `muon`'s Newton-Schulz iteration. `auto`: bf16 on a GPU that supports it, else fp32."""
    state_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Dtype in which `adamw` stores its two moments. `bf16` halves their memory and rounds them stochastically; `int8`
    quarters it, with a scale for each block of 256. Parameters with fewer than 4,096 elements keep fp32."""
    schedule: Literal["linear", "cosine", "constant", "polynomial", "inverse_sqrt", "wsd"] | OwnName = "linear"
    """Learning rate schedule after the warm-up; `wsd` is warm-up, stable, decay. Your own, as
    `package.module:function`, gives the share of the peak for `(step, total_steps, optim)`, warm-up included."""
    schedule_steps: Count | None = None
    """Length of the schedule, in steps; after it, the learning rate stays constant. Default: all steps of the run. If a
    run is extended, the schedule is recomputed for the new length, unless this is set to the old one."""
    warmup: Annotated[int, Field(ge=0)] | Fraction = 0
    """Warm-up: a number of steps (`500`), or a fraction of the schedule's steps (`0.05`)."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate of `linear`, `cosine`, `polynomial` and `wsd`, as a fraction of the peak."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Fraction of the schedule's steps that `wsd` spends decaying."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`."""
    options: Annotated[dict[Text, Any], AfterValidator(refuse_secrets)] = {}
    """Further arguments of an optimizer given as `package.module:Class`."""
    ema: Fraction | None = None
    """Decay of an exponential moving average of the weights, such as 0.999. Evaluations, `predict`, `generate`
    and exports use the average; training does not. It takes 4 bytes per trained parameter."""
    groups: list[ParameterGroup] = []
    """Settings for some parameters, by name. A parameter belongs to the first group that matches."""
    layer_lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor between the learning rates of a block and of the next: the last of n blocks has this share of the learning
    rate, and what is before the first, such as embeddings, this share to the power of n + 1."""


class LoraSection(Section):
    """Low-rank adapters (Hu et al. 2021): the pretrained weights are frozen, and small matrices are trained."""

    rank: Count = 8
    """Rank of the adapters."""
    ranks: dict[RegularExpression, Count] = {}
    """Other ranks by module, as in `{down_proj: 32}`: the end of a module's name, or a regular expression for it
    (peft's `rank_pattern`)."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The adapters' output is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / √rank instead, so that adapters of high rank learn as fast (Kalajdzievski 2023)."""
    dropout: Fraction = 0.0
    """Dropout on the adapters' input."""
    modules: list[str] | Literal["attention", "linear"] = "attention"
    """What to adapt: peft's default attention projections, all linear layers, or a list of these words and of suffixes
    of module and fused parameter names (`[linear, experts]`, as MoE experts are not linear layers)."""
    train: list[str] = []
    """Modules to train fully, in addition to the adapters; a new classification head is always fully trained."""
    base: Literal["fp32", "bf16", "int8", "nf4"] | None = None
    """How the frozen weights of linear layers are stored, but for the output head: `nf4` takes half a byte a weight
    (QLoRA, with double quantization), `int8` one, and matrix products are as `precision` says. Default: as they are
    multiplied."""

    dora: bool = False
    """Train the length of each row of the adapted weights besides its direction, which the adapters change (DoRA, Liu
    et al. 2024); slower, as each forward computes the lengths."""

    @property
    def packs(self) -> bool:
        """Whether ``base`` stores weights other than layers compute with them, whatever the precision is."""
        return self.base not in (None, "fp32")


class EveryKthBlock(Section):
    every: Count
    """Recompute every k-th block; 1 is the same as `full`."""


def _known_strategy(name: str) -> str:
    try:
        find_strategy(name)
    except UserError as error:
        if ":" in name or name in STRATEGIES:  # registered, but cannot be imported
            raise ValueError(f"{error.what}; {error.remedy}") from error
        raise PydanticCustomError("unknown_strategy", "no such strategy") from error
    return name


_STRATEGY_WORDS = [
    {"enum": [AUTO, *STRATEGIES.names()]},
    {"type": "string", "$comment": "the form package.module:name"},  # or a name from a package not yet installed
]
StrategyName = Annotated[str, AfterValidator(_known_strategy), Field(json_schema_extra={"anyOf": _STRATEGY_WORDS})]
"""A registered strategy, or ``package.module:name``."""


class ParallelSection(Section):
    strategy: StrategyName = "auto"
    """How parameters, gradients and optimizer state are distributed over the data-parallel ranks. `auto`: `deepspeed`
    if there is a section `deepspeed`; else `single` in one process; `ddp` if the task builds its own model, the degrees
    below use all ranks (one replica), or the model's state fits into each rank's memory; else `fsdp`."""
    tensor: Count = 1
    """Tensor-parallel degree: number of ranks that the matrices of each layer are sharded over."""
    sequence: bool = False
    """tensor: also shard the activations between the matrices, along the sequence (sequence parallelism)."""
    pipeline: Count = 1
    """Pipeline-parallel degree: number of ranks that the layers are split over."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """pipeline: order in which a stage processes its micro-batches."""
    cuts: list[Count] | None = None
    """pipeline: number of layers in each stage (`interleaved` has twice as many stages as ranks). Default: balanced by
    number of parameters."""
    context: Count = 1
    """Context-parallel degree: number of ranks that each sequence is sharded over."""
    activation_checkpointing: Literal["none", "full", "selective", "attention"] | EveryKthBlock = "none"
    """What the backward pass recomputes instead of storing. `full`: everything in every block. `attention`: all but
    the outputs of attention and of collectives. `selective`: all but these and the outputs of matrix products.
    `{every: k}`: every k-th block."""
    compile: bool = False
    """Compile each repeated block with torch.compile."""
    fp8: Literal["tensorwise", "rowwise"] | None = None
    """Train the linear layers of the repeated blocks with fp8 matrix products (torchao). `tensorwise`: one scale per
    matrix (compute capability 8.9 or higher). `rowwise`: one scale per row (9.0 or higher), with smaller rounding
    errors. Weights keep their dtype; all else is bf16, including evaluation."""
    reshard: bool | None = None
    """fsdp: `true`: free gathered parameters after each forward, and reduce gradients in each micro-batch (ZeRO-3);
    `false`: gather and reduce once per step, and keep both unsharded until then. Default: `true`, or `false` with
    a pipeline."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """ddp, zero1, fsdp: dtype in which data-parallel ranks send and sum gradients. `bf16` halves the traffic and rounds
    every sum to three digits. With fsdp, sums over `parallel.replicate` stay in fp32."""
    replicate: Count = 1
    """fsdp: number of replicas of the sharded model (hybrid sharding)."""
    offload: bool = False
    """fsdp, deepspeed: keep the optimizer state in host memory, and the parameters too if they are sharded."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """deepspeed: ZeRO stage. 0 shards nothing; 1, the optimizer state; 2, also the gradients; 3, also the parameters.
    Default: 2, or 1 with a pipeline."""
    check_replicas: Count | None = None
    """Every so many steps, compare the weights of ranks that must hold the same ones, bit by bit. A difference, as from
    failing memory, ends the run, and names the rank."""

    @property
    def features(self) -> Strategy:
        """The strategy's features; code should test these rather than the name."""
        return find_strategy(self.strategy)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that together hold one replica of the model."""
        return self.tensor * self.pipeline * self.context


class EvalSection(Section):
    every: Count | None = None
    """Evaluate on the validation data every N steps; a run always evaluates at its end."""
    at_start: bool = False
    """Also evaluate before the first step."""
    metric: Annotated[str, Field(min_length=1)] = "loss"
    """The score that determines the best checkpoint."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether a lower or a higher score is better. `auto`: the usual direction of a score that drawbar knows (`loss` or
    `mse`: lower; `accuracy` or `bleu`: higher); a resumed run keeps its choice. Your own scores need `min` or `max`.
    Ties keep the earlier checkpoint."""
    patience: Count | None = None
    """Stop after this many consecutive evaluations without a better score."""
    micro_batch: Count | None = None
    """Rows per evaluation forward. Default: as in `train`; for `auto`, 8,192 tokens, or 32 rows without tokens."""
    samples: Count | Annotated[list[Text], Field(min_length=1)] | None = None
    """Show what the model writes at each evaluation, with the most likely token at each place: after this many prompts
    of the validation data, or after these prompts; of tasks that predict, this many predictions. The texts go to the
    console, the trackers, the report and `eval/validation/samples.jsonl`."""
    sample_tokens: Count = 64
    """Maximum number of tokens of such a text."""


class CheckpointSection(Section):
    every: Count | Interval | None = "30min"
    """Save every N steps, or this long after the last save (`90s`, `30min`, `2h`, `1d`). A run always saves at its end
    and when it is stopped."""
    keep: Count = 3
    """Number of most recent checkpoints to keep."""
    keep_best: bool = True
    """Save whenever an evaluation finds a better score, and keep the best checkpoint in addition to `keep`."""
    layout: Literal["auto", "whole", "parts"] = "auto"
    """`parts`: all processes write their own shards in parallel, to a disk that all nodes share. `whole`: rank 0
    gathers and writes full tensors. `auto`: parts if a checkpoint is larger than 2 GiB and all nodes share its disk.
    Any layout can be read with any layout, strategy and number of processes."""
    on_error: Literal["warn", "stop"] = "stop"
    """What to do if a save fails because the disk is full, broken or read-only. `stop`: retry once, then end the run
    with an error. `warn`: warn, and continue without that checkpoint until the next save is due. With either, the save
    at the end of a run must succeed. Older checkpoints are never lost."""
    remote: Annotated[Text, AfterValidator(check_store_url)] | None = None
    """Copy every checkpoint to an object store, in the background: `s3://bucket/runs` (needs the extra `object-store`),
    or another URL that fsspec supports. The run uses the folder `<run.name>` there, and resumes from it if its disk is
    lost. Credentials do not belong in the URL."""


class ProfileSection(Section):
    start: Count
    """First step to profile."""
    steps: Count = 1
    """Number of steps to profile."""


class TrackingSection(Section):
    log_every: Count = 10
    """Log metrics every N steps."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    trackers: Annotated[dict[Text, dict[str, Any] | None], AfterValidator(refuse_secrets)] = {}
    """Further trackers and their options, as in `{wandb: {project: demo}}`: `wandb`, `mlflow`, `trackio`, one from an
    installed package, or your own as `package.module:Class`. `null` in place of the options disables a tracker."""
    profile: ProfileSection | None = None
    """Record a torch.profiler trace of these steps in `<run>/profile/`."""


class LimitsSection(Section):
    """How many seconds a rank may go without progress; a rank that takes longer is ended and named. If something of the
    kind has taken longer before in this run, the limit is ten times that."""

    start: Seconds = 14_400
    """Before the first step is done: imports, reading and encoding the data, compiling."""
    step: Seconds | None = None
    """In one phase of a step, such as a forward. `null`: `launch.timeout`."""
    save: Seconds = 14_400
    """While the other ranks wait for a checkpoint to be written, or copied to `checkpoint.remote`."""
    callback: Seconds = 3_600
    """In a callback, or in other work of one rank that the others wait for, such as scoring."""


class LaunchSection(Section):
    nproc: Count | Auto = "auto"
    """Number of processes to start on this machine. `auto`: one per GPU, or one without GPUs. Ignored under
    `torchrun`."""
    timeout: Seconds = 600
    """Seconds without a heartbeat from another process after which waiting processes give up and name it. A process
    known to be working (writing a checkpoint, encoding, scoring) is waited for as long as `launch.limits` says."""
    limits: LimitsSection = LimitsSection()
    restarts: Annotated[int, Field(ge=0)] = 0
    """On one machine: number of times in a row, without a new checkpoint between, that the launcher starts all
    processes again after it has lost one (killed, crashed or stuck). They resume from the newest checkpoint."""
    roll_call_seconds: Annotated[int, Field(ge=5)] = 60
    """Node check: seconds that the nodes of a job wait for one another before training. After that, drawbar names the
    missing nodes and ends the run."""


C = TypeVar("C", bound=BaseModel)


def _with_fields(config: type[C], **fields: Any) -> type[C]:
    """Derive a configuration class with these fields added or replaced."""
    # a class made here has no source, and pydantic would search every loaded module for its docstrings
    switched_off: Any = {"use_attribute_docstrings": False}
    return create_model(
        config.__name__,
        __base__=config,
        __module__=config.__module__,
        __doc__=config.__doc__,
        __cls_kwargs__=switched_off,
        **fields,
    )


def _with_sections_of_guests(config: type[C]) -> type[C]:
    fields = {
        name: (section | None, Field(default=None, description=section.__doc__))
        for name, section in guest_sections().items()
        if name not in config.model_fields
    }
    return _with_fields(config, **fields)


@_with_sections_of_guests
class RunConfig(Section):
    """A complete run. All sections are optional; every default is written to the run's `config.yaml`."""

    run: RunSection = RunSection()
    task: SerializeAsAny[TaskConfig] = CausalLMConfig()
    data: DataSection = DataSection()
    lora: LoraSection | None = None
    """Train low-rank adapters instead of all weights (needs `peft`). With bf16 and fp16, the frozen weights of linear
    layers are stored in that precision."""
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of matrix products and, with `bf16`, of the residual stream. Trained weights stay in fp32. `auto`: bf16 on
    a GPU that supports it, else fp32; a resumed run keeps its choice. For fp8, see `parallel.fp8`."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to run on. `auto`: CUDA, else Apple's MPS (one process), else the CPU."""
    parallel: ParallelSection = ParallelSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    callbacks: Annotated[list[Text | dict[Text, dict[str, Any]]], AfterValidator(refuse_secrets)] = []
    """Callbacks, each given as `package.module:Class`, or with options as `{package.module:Class: {every: 10}}`."""
    launch: LaunchSection = LaunchSection()

    @field_validator("task")
    @classmethod
    def _check_task_is_stored(cls, task: TaskConfig) -> TaskConfig:
        if type(task) not in BUILT_IN_TASKS.values():
            check_stored(task)
        return task

    @property
    def strategy(self) -> Strategy:
        """The strategy of ``parallel``; for ``auto``, the one that a guest's section chooses, else a placeholder."""
        if self.parallel.strategy != AUTO:
            return self.parallel.features
        return find_strategy(next(iter(self._strategies_of_sections().values()), AUTO))

    def with_parallel(self, parallel: ParallelSection) -> Self:
        """The same run with another section ``parallel``. Drops a guest's section that a strategy reads, unless the new
        configuration uses that strategy too, with the same ``zero_stage`` and ``offload``."""
        changed = self.model_copy(update={"parallel": parallel})
        same = all(getattr(parallel, name) == getattr(self.parallel, name) for name in ("zero_stage", "offload"))
        kept = changed.strategy.name if same else None
        dropped = [name for name, strategy in self._strategies_of_sections().items() if strategy != kept]
        return changed.model_copy(update=dict.fromkeys(dropped))

    def _strategies_of_sections(self) -> dict[str, str]:
        """The strategies that read the guests' sections that are set, by section."""
        return {name: value.strategy for name, value in self if isinstance(value, GuestSection) and value.strategy}

    @property
    def has_process_per_gpu(self) -> bool:
        """Whether a node runs one process per GPU, as with ``launch.nproc: auto``, so the number of GPUs must be known.
        False under ``dp``, where one process computes on all GPUs."""
        one_process = self.device in ("cpu", "mps") or self.parallel.features.one_process
        return self.launch.nproc == "auto" and not one_process

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def cache_dir(self) -> Path:
        """Folder for encoded data, shared by all runs in `run.dir`."""
        return Path(self.data.cache or Path(self.run.dir) / ".cache")


@cache
def run_config_type(task_config: type[TaskConfig]) -> type[RunConfig]:
    """``RunConfig`` with this task's own ``Config`` as its ``task`` section."""
    return _with_fields(RunConfig, task=(task_config, Field(default_factory=task_config)))
