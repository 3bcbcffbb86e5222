"""The whole ``RunConfig`` tree: every setting, its type, its default, and what it means.

The text below a field is its documentation: ``drawbar config explain`` prints it and ``docs/configuration.md`` is
generated from it. The models are strict (no silent conversions), closed (an unknown key is an error) and frozen.
"""

import json
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
    """Refuse an option that is not read back from ``config.yaml`` as it was written there.

    Raises:
        ValueError: it names the option.
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
    """The option by name as ``config.yaml`` holds it; empty if the class excludes the field from dumps."""
    try:
        return options.model_dump(mode="json", include={name}, warnings=False)
    except PydanticSerializationError as error:
        value = getattr(options, name)
        raise ValueError(
            f"the option {name} is {value!r:.60}, of the type {type(value).__name__}, which the run's config.yaml "
            "cannot hold; let it be a text, a number, a list or a mapping, and make the object of it in the task"
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
    """Folder that holds the run directories."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights, the dropout and the order of the data."""
    deterministic: bool = False
    """Use only deterministic GPU kernels (slower); a CPU run is deterministic anyway."""


class TrainSection(Section):
    global_batch: Count = 32
    """Rows (samples, or packs of samples) in one optimizer step, over all processes and accumulation."""
    micro_batch: Count | Auto = "auto"
    """Rows in one forward and backward on one process. It changes speed and memory, never the result. `auto`: as many
    as 8,192 tokens allow; on CUDA as many as fit into the memory, found by trial steps before training and kept in the
    run directory, but no more than those 8,192 tokens where batches are padded (`data.batching: padded`, not
    padding-free). There are no trials with `dp`, `deepspeed`, a pipeline or streaming."""
    micro_batch_tokens: Count | None = None
    """Instead of `micro_batch`: most tokens, padding included, in one forward and backward on one process."""
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
    """Decoupled weight decay (`sgd` adds it to the gradient); never applied to biases and norms."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: Annotated[float, Field(gt=0)] = 1.0e-8
    """AdamW's epsilon."""
    momentum: Fraction | None = None
    """Momentum of `sgd` (default 0) and `muon` (default 0.95)."""
    muon_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of `muon`'s iteration. `auto`: bf16 on a GPU that has it, else fp32."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of `adamw`'s two moments between steps. `bf16` halves their memory, and rounds them stochastically;
    parameters with fewer than 4,096 elements keep fp32."""
    schedule: Literal["linear", "cosine", "constant", "polynomial", "inverse_sqrt", "wsd"] = "linear"
    """How the learning rate goes on after the warm-up; `wsd` is warm-up, stable, decay."""
    schedule_steps: Count | None = None
    """How many steps the schedule is for; after these, the learning rate stays that of the last of them. Default: all
    steps of the run. Where a run goes on to more steps, the schedule is computed anew for them, unless this is set to
    the old number."""
    warmup: Annotated[int, Field(ge=0)] | Fraction = 0
    """Warm-up: a number of steps (`500`), or a fraction of all steps of the schedule (`0.05`)."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where `linear`, `cosine`, `polynomial` and `wsd` end, as a share of the peak learning rate."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of all steps of the schedule that `wsd` spends decaying."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`."""


class LoraSection(Section):
    """Low-rank adapters (Hu et al. 2021): the pretrained weights stay as they are, and small matrices learn."""

    rank: Count = 8
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The adapters' output is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout of the adapters' input."""
    modules: list[str] | Literal["attention", "linear"] = "attention"
    """What gets adapters: peft's usual attention projections, all linear layers, or a list: of these words, and of the
    ends of names of modules and of fused parameters (`[linear, experts]`: a mixture's experts are no linear layers)."""
    train: list[str] = []
    """Modules to train whole besides the adapters; a new classification head is always trained whole."""


class EveryKthBlock(Section):
    every: Count
    """Recompute every so many-th block: 1 is the same as `full`."""


def _known_strategy(name: str) -> str:
    try:
        find_strategy(name)
    except UserError as error:
        if ":" in name or name in STRATEGIES:  # it is registered, and cannot be imported
            raise ValueError(f"{error.what}; {error.remedy}") from error
        raise PydanticCustomError("unknown_strategy", "no such strategy") from error
    return name


_STRATEGY_WORDS = [
    {"enum": [AUTO, *STRATEGIES.names()]},
    {"type": "string", "$comment": "the form package.module:name"},  # or a package's that will be installed
]
StrategyName = Annotated[str, AfterValidator(_known_strategy), Field(json_schema_extra={"anyOf": _STRATEGY_WORDS})]
"""A registered strategy, or ``package.module:name``."""


class ParallelSection(Section):
    strategy: StrategyName = "auto"
    """How parameters, gradients and optimizer state lie on the data-parallel ranks. `auto`: `deepspeed` with a
    section `deepspeed`; else `single` in one process; `ddp` where the task builds its own model, the degrees below take
    all ranks (there is one replica), or the model's state fits into each rank's memory; else `fsdp`."""
    tensor: Count = 1
    """Tensor-parallel degree: the matrices of each layer are sharded over so many ranks."""
    sequence: bool = False
    """tensor: shard the activations between the matrices along the sequence, too (sequence parallelism)."""
    pipeline: Count = 1
    """Pipeline-parallel degree: the layers are split into so many stages."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """pipeline: in which order a stage works on micro-batches."""
    cuts: list[Count] | None = None
    """pipeline: the sizes of the stages, in layers (`interleaved` has twice as many stages as ranks); by default
    balanced by the number of parameters."""
    context: Count = 1
    """Context-parallel degree: each sequence is sharded over so many ranks."""
    activation_checkpointing: Literal["none", "full", "selective", "attention"] | EveryKthBlock = "none"
    """What the backward pass computes again instead of keeping it: `full`, all of every block; `attention`, all but
    the results of attention and of collectives; `selective`, all but these and the results of matrix products;
    `{every: k}`, every k-th block."""
    compile: bool = False
    """Compile each repeated block with torch.compile."""
    fp8: Literal["tensorwise", "rowwise"] | None = None
    """Linear layers of the repeated blocks multiply in fp8 while they train, by torchao: `tensorwise` with one scale in
    a matrix (GPUs of compute capability 8.9 or more), `rowwise` with one in each row (9.0 or more), which rounds less.
    Weights stay as they are; all else is bf16, evaluation too."""
    reshard: bool | None = None
    """fsdp: `true`: in each micro-batch free gathered parameters after the forward, and reduce gradients (ZeRO-3);
    `false`: gather and reduce once a step, and keep both whole until then. Default: `true`, or `false` with
    a pipeline."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """ddp, zero1, fsdp: dtype in which data-parallel ranks send and sum gradients. `bf16` is half the traffic,
    and rounds every sum to three digits. With fsdp, sums over `parallel.replicate` stay in fp32."""
    replicate: Count = 1
    """fsdp: number of replicas of the sharded model (hybrid sharding)."""
    offload: bool = False
    """fsdp, deepspeed: keep optimizer state in host memory, and also parameters where they are sharded."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """deepspeed: ZeRO stage: 0 shards nothing, 1 the optimizer's state, 2 gradients as well, 3 parameters as well.
    Default: 2, or 1 with a pipeline."""

    @property
    def features(self) -> Strategy:
        """What the strategy can do: code asks for this, and rarely for a name."""
        return find_strategy(self.strategy)

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one model together."""
        return self.tensor * self.pipeline * self.context


class EvalSection(Section):
    every: Count | None = None
    """Evaluate on the validation data every so many steps; a run always evaluates at its end."""
    at_start: bool = False
    """Evaluate before the first step as well."""
    metric: Annotated[str, Field(min_length=1)] = "loss"
    """The score that decides which checkpoint is the best."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether a smaller or a larger score is better. `auto`: as is usual for a score drawbar knows (`loss` or `mse`:
    smaller; `accuracy` or `bleu`: larger); a resumed run keeps its choice. A score of your own needs `min` or `max`.
    A tie keeps the first."""
    patience: Count | None = None
    """Stop after this many evaluations in a row without a better score."""
    micro_batch: Count | None = None
    """Rows in an evaluation forward. Default: as in `train`; for `auto`, 8,192 tokens, or 32 rows without tokens."""


class CheckpointSection(Section):
    every: Count | Interval | None = "30min"
    """Save every so many steps, or so long after the last save (`30min`; `s`, `h` and `d`, too); a run always saves at
    its end, and when it is told to stop."""
    keep: Count = 3
    """How many of the newest checkpoints to keep."""
    keep_best: bool = True
    """Save whenever the evaluation finds a better score, and keep the best checkpoint in addition to `keep`."""
    layout: Literal["auto", "whole", "parts"] = "auto"
    """`parts`: each process writes its own shards, at the same time as the others, to a disk that all nodes share.
    `whole`: rank 0 gathers whole tensors and writes them. `auto`: parts where a checkpoint is larger than 2 GiB and all
    nodes share its disk. Runs of any layout, strategy and number of processes read either."""
    on_error: Literal["warn", "stop"] = "stop"
    """Where a save fails because its disk is full, fails or can only be read: `stop` tries once more, and ends the run
    with an error; `warn` warns, and goes on without that checkpoint until the next save is due. The save at the end of
    a run must succeed with both. No older checkpoint is lost."""
    remote: Annotated[Text, AfterValidator(check_store_url)] | None = None
    """Copy every checkpoint to an object store, in the background: `s3://bucket/runs` (which needs the extra
    `object-store`), or another URL that fsspec knows. The run has the folder `<run.name>` there, and goes on from it
    where its disk is lost. Credentials are no part of the URL."""


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
    trackers: Annotated[dict[Text, dict[str, Any] | None], AfterValidator(refuse_secrets)] = {}
    """Other trackers, each with its options: `wandb`, `mlflow`, `trackio`, one of an installed package, or a class of
    your own as `package.module:Class`. As in `{wandb: {project: demo}}`; `null` instead of options leaves one out."""
    profile: ProfileSection | None = None
    """Record a torch.profiler trace of these steps in `<run>/profile/`."""


class LaunchSection(Section):
    nproc: Count | Auto = "auto"
    """Processes to start on this machine; `auto`: one for each GPU, or one. `torchrun` overrules it."""
    timeout: Annotated[int, Field(ge=10)] = 600
    """Processes that wait for another one give up, and name it, after so many seconds without a heartbeat from it. A
    process that is known to work (it writes a checkpoint, encodes or scores) is waited for until it is done."""
    roll_call_seconds: Annotated[int, Field(ge=5)] = 60
    """The node check: seconds that the nodes of a job wait for one another before training. Then those that did not
    answer are named, and the run ends."""


C = TypeVar("C", bound=BaseModel)


def _with_fields(config: type[C], **fields: Any) -> type[C]:
    """A class of configurations with these fields besides, or in the place of its own."""
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
    """A whole run. Every section can be left out; every default is written to the run's `config.yaml`."""

    run: RunSection = RunSection()
    task: SerializeAsAny[TaskConfig] = CausalLMConfig()
    data: DataSection = DataSection()
    lora: LoraSection | None = None
    """Train low-rank adapters instead of all weights (needs `peft`). In bf16 and fp16, frozen weights of linear layers
    are stored in that precision."""
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of matrix products, and with `bf16` of the residual stream. Trained weights stay fp32. `auto`: bf16 on a
    GPU that has it, else fp32; a resumed run keeps what it began with. For fp8 see `parallel.fp8`."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """What to run on. `auto`: CUDA, else Apple's MPS (one process), else the CPU."""
    parallel: ParallelSection = ParallelSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    callbacks: Annotated[list[Text | dict[Text, dict[str, Any]]], AfterValidator(refuse_secrets)] = []
    """Callbacks, each as `package.module:Class`, or with options as in `{package.module:Class: {every: 10}}`."""
    launch: LaunchSection = LaunchSection()

    @field_validator("task")
    @classmethod
    def _check_task_is_stored(cls, task: TaskConfig) -> TaskConfig:
        if type(task) not in BUILT_IN_TASKS.values():
            check_stored(task)
        return task

    @property
    def strategy(self) -> Strategy:
        """The strategy of ``parallel``; for ``auto``, the one that a guest's section chooses, or else a stand-in."""
        if self.parallel.strategy != AUTO:
            return self.parallel.features
        return find_strategy(next(iter(self._strategies_of_sections().values()), AUTO))

    def with_parallel(self, parallel: ParallelSection) -> Self:
        """The same run with another section ``parallel``. A guest's section that a strategy reads is dropped, unless
        the new configuration runs under that strategy, too, and has the same ``zero_stage`` and ``offload``."""
        changed = self.model_copy(update={"parallel": parallel})
        same = all(getattr(parallel, name) == getattr(self.parallel, name) for name in ("zero_stage", "offload"))
        kept = changed.strategy.name if same else None
        dropped = [name for name, strategy in self._strategies_of_sections().items() if strategy != kept]
        return changed.model_copy(update=dict.fromkeys(dropped))

    def _strategies_of_sections(self) -> dict[str, str]:
        """Of each guest's section that is set, and that a strategy reads: that strategy."""
        return {name: value.strategy for name, value in self if isinstance(value, GuestSection) and value.strategy}

    @property
    def has_process_per_gpu(self) -> bool:
        """Whether a node runs a process for each of its GPUs, as ``launch.nproc: auto`` does, and so their number must
        be known. False under ``dp``, whose one process computes on all GPUs."""
        one_process = self.device in ("cpu", "mps") or self.parallel.features.one_process
        return self.launch.nproc == "auto" and not one_process

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def cache_dir(self) -> Path:
        """Where encoded data lie, for all runs in `run.dir`."""
        return Path(self.data.cache or Path(self.run.dir) / ".cache")


@cache
def run_config_type(task_config: type[TaskConfig]) -> type[RunConfig]:
    """``RunConfig`` whose ``task`` section is this task's own ``Config``."""
    return _with_fields(RunConfig, task=(task_config, Field(default_factory=task_config)))
