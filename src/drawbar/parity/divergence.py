"""Where a strategy first diverges from one process: the first module whose output, or whose gradient, differs.

A step of very few rows is made from the first weights: by one process, and under the strategy. Hooks on every module
see its outputs in the forward pass, and their gradients in the backward pass. The reference's are kept, and
broadcast; each rank keeps those of its rows, and compares its own as they come. If a rank has a part of an output, the
part is looked for in the whole. ``diagnose`` names the module to look at first.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.loader import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, without_rank_in_environment
from drawbar.engines.engine import Engine
from drawbar.engines.parts import Executor
from drawbar.parallel.pipeline.stages import StageInput, Zero
from drawbar.parity.comparison import (
    FP32_TOLERANCES,
    Comparison,
    Differences,
    Distances,
    Fault,
    Limits,
    Reference,
    Trace,
    Worst,
    at_step,
    by_every_name,
    difference,
    gradient_differences,
    limits,
    noises,
    norm,
)
from drawbar.parity.recorder import clean_name, groups_of_tied_names, modules_of
from drawbar.parity.workload import Workload
from drawbar.runtime.torch_internals import tree_leaves
from drawbar.tasks.batch import Batch

MicroBatches = list[MicroBatch[Batch]]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class ModuleDifference:
    """An output, or its gradient, that differs from the reference's."""

    kind: str
    """``output`` or ``gradient``."""
    module: str
    value: float
    rank: int
    whole: bool
    """Whether this rank has all of it."""


@dataclass
class ModuleRecord:
    """Outputs of all modules in one micro-batch and their gradients, in order of execution, by ``module#call#output``
    (numbers from 0)."""

    outputs: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    limits: dict[str, Limits] = field(default_factory=dict)
    """By kind (``output`` or ``gradient``): the largest differences that are not a fault."""

    def differences(self, other: "ModuleRecord") -> dict[str, Differences]:
        """How far another record of the same rows is from this one, by kind."""
        pairs = {"output": (other.outputs, self.outputs), "gradient": (other.gradients, self.gradients)}
        return {
            kind: {key: difference(found[key], tensor) for key, tensor in expected.items() if key in found}
            for kind, (found, expected) in pairs.items()
        }


@dataclass
class Probe:
    """Measurements of all ranks in the step of few rows."""

    mismatches: list[ModuleDifference]
    worst: dict[tuple[str, str], Worst]
    """By (kind, module): the worst difference on any rank."""
    agreed: set[tuple[str, str]]
    """(kind, module) of full tensors that match the reference on some rank."""
    agreed_shards: set[tuple[str, str]]
    """(kind, module) of shards that match some slice of the reference on some rank."""
    order: dict[str, list[str]]
    """By kind: the modules in the order in which the reference computes them."""
    found: Tensors
    """The gradients of the parameters under the strategy."""
    expected: Tensors
    """The same in one process."""
    limits: Limits
    """The largest differences of these gradients that are not a fault."""
    ties: list[list[str]]
    gradient_factors: dict[int, float]
    """By rank, of data-parallel leaders: the factor by which it scales its loss, where it could be measured."""


@dataclass(frozen=True)
class ReferenceStep:
    """A step of one process."""

    records: list[ModuleRecord]
    """Of each data-parallel rank's first micro-batch."""
    gradients: Tensors
    ties: list[list[str]]


def find_divergence(workload: Workload, config: RunConfig, reference: RunConfig, world: Distributed) -> Probe | None:
    """Make the step of few rows, and return its measurements on rank 0. Collective.

    Args:
        config: the workload's, run in the way that failed.
        reference: the workload's, run in one process.
    """
    rows = 2 * config.parallel.pipeline if config.parallel.pipeline > 1 else 1  # every stage should have work
    few = {"global_batch": rows * world.dp_ranks.size, "micro_batch": 1, "micro_batch_tokens": None}
    train = config.train.model_copy(update=few)
    loader = workload.loader(config.model_copy(update={"train": train}), world)
    _, micro_batches = next(iter(loader.steps(0, 1)))
    micro_batches_by_rank = world.dp_ranks.gather_from_leaders(micro_batches)
    records = [ModuleRecord() for _ in range(world.dp_ranks.size)]
    reference_step, gradient_limits = ReferenceStep(records, {}, []), FP32_TOLERANCES.gradients
    if micro_batches_by_rank is not None:
        with world.working("making a step in one process"), without_rank_in_environment():
            reference_step = record_step(workload, reference, world, micro_batches_by_rank)
            gradient_limits = _measure(
                workload, reference, config.precision, world, micro_batches_by_rank, reference_step
            )
    expected = _reference_of_this_rank(reference_step.records, world)
    engine = workload.engine(config, world, workload.total_steps(config, loader.steps_per_epoch))
    comparer = _Comparer(expected, world)
    comparer.watch(engine, staged=config.parallel.pipeline > 1)
    found = _step(engine, micro_batches)
    own_report = (
        comparer.mismatches,
        comparer.agreed,
        comparer.agreed_shards,
        comparer.gradient_factor,
        comparer.worst,
    )
    reports = world.gather(own_report)
    if reports is None:
        return None
    order = {"output": _modules(expected.outputs), "gradient": _modules(expected.gradients)}
    mismatches = [mismatch for mismatches, *_ in reports for mismatch in mismatches]
    agreed, agreed_shards = (set().union(*(report[place] for report in reports)) for place in (1, 2))
    worst: dict[tuple[str, str], Worst] = {}
    for *_, of_rank in reports:
        for key, one in of_rank.items():
            worst[key] = one.or_worse(worst.get(key))
    gradients = (found, reference_step.gradients, gradient_limits)
    factors = {rank: factor for rank, (*_, factor, _) in enumerate(reports) if factor is not None}
    return Probe(mismatches, worst, agreed, agreed_shards, order, *gradients, reference_step.ties, factors)


def record_step(
    workload: Workload, config: RunConfig, world: Distributed, micro_batches_by_rank: Sequence[MicroBatches]
) -> ReferenceStep:
    """One process's step over the micro-batches of all ranks."""
    alone = Distributed(RankInfo(), world.device, world.timeout.total_seconds())
    built = workload.engine(config, alone, workload.total_steps(config, None if config.train.steps else 1))
    starts, total = [], 0
    for micro_batches in micro_batches_by_rank:
        starts.append(total)
        total += len(micro_batches)
    recorder = _Recorder({start: ModuleRecord() for start in starts})
    recorder.watch(built)
    parts = replace(built.parts, executor=_OneByOne(built.executor, recorder.begin_micro_batch))
    engine = Engine(built.task, built.config, alone, parts, built.total_steps)
    gradients = _step(engine, [micro for micro_batches in micro_batches_by_rank for micro in micro_batches])
    ties = groups_of_tied_names(recorder.parameters_by_all_names(engine))
    return ReferenceStep(list(recorder.records.values()), gradients, ties)


def _measure(
    workload: Workload,
    config: RunConfig,
    precision: str,
    world: Distributed,
    micro_batches_by_rank: Sequence[MicroBatches],
    reference_step: ReferenceStep,
) -> Limits:
    """Measure what rounding does in this step: sets the limits of the records, returns those of the gradients."""
    low = config.model_copy(update={"precision": precision})
    apart: list[Differences] = []
    of_records: list[list[dict[str, Differences]]] = [[] for _ in reference_step.records]
    for noise in noises(precision):
        other = record_step(replace(workload, noise=noise), low, world, micro_batches_by_rank)
        apart.append(gradient_differences(other.gradients, reference_step.gradients))
        for found, record, rounded in zip(of_records, reference_step.records, other.records, strict=True):
            found.append(record.differences(rounded))
    for found, record in zip(of_records, reference_step.records, strict=True):
        record.limits = {
            kind: limits(FP32_TOLERANCES.gradients, [one[kind] for one in found]) for kind in ("output", "gradient")
        }
    return limits(FP32_TOLERANCES.gradients, apart)


def _step(engine: Engine, micro_batches: MicroBatches) -> Tensors:
    """The gradients of one step."""
    kept: list[Tensors] = []
    with closing(engine), engine.inspecting(lambda: kept.append(engine.gradients())):
        engine.train_step(micro_batches)
    return kept[0] if kept else {}


def _reference_of_this_rank(records: Sequence[ModuleRecord], world: Distributed) -> ModuleRecord:
    """The reference's record of this rank's first micro-batch, sent from rank 0."""
    own = ModuleRecord()
    for number in range(world.dp_ranks.size):
        record = records[number]
        outputs, output_order, gradients, gradient_order, allowed = world.from_rank0(
            lambda record=record: (  # type: ignore[misc]
                save(record.outputs),
                list(record.outputs),
                save(record.gradients),
                list(record.gradients),
                record.limits,
            ),
            "sending a record",
        )
        if number == world.dp_ranks.rank:
            of_outputs, of_gradients = load(outputs), load(gradients)
            own = ModuleRecord(
                {key: of_outputs[key] for key in output_order},
                {key: of_gradients[key] for key in gradient_order},
                allowed,
            )
    return own


def _modules(keys: Any) -> list[str]:
    return list(dict.fromkeys(key.partition("#")[0] for key in keys))


class _Hooks:
    """Hooks on every output of every module, by ``module#call#number``, and on its gradient."""

    def watch(self, engine: Engine, staged: bool = False) -> None:
        """Args: staged: whether the modules are stages. Then placeholders of pruned modules, and their parents, are
        skipped."""
        for root in modules_of(engine):
            replaced = [
                f"{name}." for name, module in root.named_modules() if staged and isinstance(module, _STAND_INS)
            ]
            for name, module in root.named_modules():
                inside = f"{name}." if name else ""
                if not any(other.startswith(inside) for other in replaced):
                    module.register_forward_hook(self._hook(clean_name(name)))
        self.calls: Counter[str] = Counter()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        @torch.compiler.disable
        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = self.calls[name]
            self.calls[name] += 1
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            for number, tensor in enumerate(leaves):
                self._on_output(f"{name}#{call}#{number}", tensor)

        return after

    def _on_output(self, key: str, tensor: Tensor) -> None:
        raise NotImplementedError


class _Recorder(_Hooks):
    """Records outputs and gradients in some of the micro-batches."""

    def __init__(self, records: dict[int, ModuleRecord]) -> None:
        self.records = records
        self._micro = -1

    def begin_micro_batch(self) -> None:
        self._micro += 1
        self.calls.clear()

    def _on_output(self, key: str, tensor: Tensor) -> None:
        record = self.records.get(self._micro)
        if record is None:
            return
        record.outputs[key] = _copy(tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: record.gradients.__setitem__(key, _copy(gradient)))

    def parameters_by_all_names(self, engine: Engine) -> Tensors:
        return {name: p for root in modules_of(engine) for name, p in root.named_parameters(remove_duplicate=False)}


class _OneByOne:
    """An executor that passes micro-batches on to another executor singly, and calls a function before each."""

    def __init__(self, executor: Executor, before_each: Callable[[], None]) -> None:
        self._executor = executor
        self._before_each = before_each

    def forward_backward(self, micro_batches: MicroBatches, scale: float) -> Tensor:
        losses = []
        for micro in micro_batches:
            self._before_each()
            losses.append(self._executor.forward_backward([micro], scale))
        return torch.stack(losses).sum()

    def evaluate(self, batch: Batch) -> tuple[Tensor, list[Any] | None]:
        return self._executor.evaluate(batch)

    def has_gradient(self, batch: Batch, training: bool) -> bool:
        return self._executor.has_gradient(batch, training)

    def inference(self) -> AbstractContextManager[Any]:
        return self._executor.inference()


class _Comparer(_Hooks):
    """Compares outputs and gradients of the first micro-batch with the reference's."""

    def __init__(self, record: ModuleRecord, world: Distributed) -> None:
        self.mismatches: list[ModuleDifference] = []
        self.worst: dict[tuple[str, str], Worst] = {}
        self.agreed: set[tuple[str, str]] = set()
        self.agreed_shards: set[tuple[str, str]] = set()
        self._record = record
        self._world = world
        self.gradient_factor: float | None = None
        """The gradients of this rank, as a multiple of the reference's, on a data-parallel leader; None on other ranks,
        and where no gradient could be compared as a whole."""
        self._scale: float | None = None

    def _on_output(self, key: str, tensor: Tensor) -> None:
        expected = self._record.outputs.get(key)
        if expected is None:  # a later micro-batch, or computed again for the backward pass
            return
        self._compare("output", key, _copy(tensor), expected)
        if tensor.requires_grad and key in self._record.gradients:
            tensor.register_hook(lambda gradient: self._on_gradient(key, _copy(gradient)))

    def _on_gradient(self, key: str, gradient: Tensor) -> None:
        expected = self._record.gradients[key]
        if self._scale is None:  # not yet known: the factor by which the strategy scales the loss, and so all gradients
            self._scale = float(self._world.dp_ranks.size)
            if gradient.shape == expected.shape and norm(expected) > 0:
                self._scale = float((gradient.double() * expected.double()).sum()) / norm(expected) ** 2 or 1.0
                self.gradient_factor = self._scale if self._world.dims.is_dp_leader(self._world.rank) else None
        self._compare("gradient", key, gradient / self._scale, expected)

    def _compare(self, kind: str, key: str, found: Tensor, expected: Tensor) -> None:
        module = key.partition("#")[0]
        whole = found.shape == expected.shape
        value = min((difference(found, piece) for piece in pieces(expected, found.shape)), default=math.inf)
        limit = self._record.limits[kind].of(key)
        worst = Worst(value, limit, f"rank {self._world.rank}")
        self.worst[kind, module] = worst.or_worse(self.worst.get((kind, module)))
        if value > limit:
            self.mismatches.append(ModuleDifference(kind, module, value, self._world.rank, whole))
        else:
            (self.agreed if whole else self.agreed_shards).add((kind, module))


_STAND_INS = (nn.Identity, StageInput, Zero)


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", torch.float32, copy=True).contiguous()


def pieces(whole: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """The shards of this shape that a rank may have of a tensor, along each shorter dim: contiguous; a slice of each of
    several fused layers; or two, from the head and the tail of a sequence (context parallelism)."""
    if whole.shape == shape:
        yield whole
        return
    if whole.ndim != len(shape):
        return
    dim = next(d for d in range(whole.ndim) if whole.shape[d] != shape[d])
    size, part = whole.shape[dim], shape[dim]
    if part == 0 or part > size:
        return
    for ranks in [size // part] if size % part == 0 else range(2, size + 1):
        cuts = list(whole.chunk(ranks, dim))
        for layers in (2, 3):
            if size % (layers * ranks) == 0:
                parts = whole.unflatten(dim, (layers, -1)).chunk(ranks, dim + 1)
                cuts += [piece.flatten(dim, dim + 1) for piece in parts]
        if size % (2 * ranks) == 0:
            ends = whole.chunk(2 * ranks, dim)
            cuts += [torch.cat([ends[i], ends[-1 - i]], dim) for i in range(ranks)]
        for cut in cuts:
            if cut.shape[dim] == part:
                yield from pieces(cut, shape)


@dataclass(frozen=True)
class ComparedModule:
    """The differences of one module. One is None if the module has no such value, or it could not be compared."""

    name: str
    """Empty for the model itself."""
    output: Worst | None = None
    """The difference of its output. This, ``gradient`` and ``parameter_gradients`` are from the step of few rows (see
    ``divergence``)."""
    gradient: Worst | None = None
    """That of the gradient of its output."""
    parameter_gradients: Worst | None = None
    """The worst difference of the gradients of its own parameters."""
    weights: Worst | None = None
    """The worst difference of its own parameters after the last step of the training."""


def compare_modules(probe: Probe, found: Distances, reference: Reference) -> list[ComparedModule]:
    """All modules, in the order in which the reference computes them.

    Args:
        found: how far the training of all steps is from the reference's.
    """
    known = by_every_name(probe.expected, probe.ties)
    complete = by_every_name(probe.found, probe.ties)
    gradients = gradient_differences({name: complete[name] for name in known if name in complete}, known)
    parameters = _by_module(gradients, probe.limits)
    weights = _by_module(found.weights, reference.tolerances.weights)
    names = [*probe.order["output"], *parameters, *weights]
    return [
        ComparedModule(
            name,
            probe.worst.get(("output", name)),
            probe.worst.get(("gradient", name)),
            parameters.get(name),
            weights.get(name),
        )
        for name in dict.fromkeys(names)
    ]


def _by_module(differences: Differences, limits: Limits) -> dict[str, Worst]:
    """The worst difference of each module's own parameters."""
    worst: dict[str, Worst] = {}
    for name, value in differences.items():
        module = name.rpartition(".")[0]
        worst[module] = Worst(value, limits.of(name), name).or_worse(worst.get(module))
    return worst


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a strategy that differs, for the report."""

    module: str
    """The first module that differs; empty if no single one does."""
    text: str


def diagnose(probe: Probe, comparison: Comparison, trace: Trace, reference: Reference) -> Diagnosis:
    """Name the module to look at first, from all measurements."""
    for kind in ("output", "gradient"):
        mismatch = _first_mismatch(probe, kind)
        if mismatch is not None:
            by = f"by {mismatch.value:.1e}, on rank {mismatch.rank}"
            if kind == "output":
                return Diagnosis(
                    mismatch.module,
                    f"outputs diverge first at {_display_name(mismatch.module)} ({by})"
                    + _describe_shards(probe, mismatch),
                )
            text = "all outputs are equal; going backward, gradients diverge first at the output of"
            return Diagnosis(mismatch.module, f"{text} {_display_name(mismatch.module)} ({by})")
    uneven = _uneven_loss(probe.gradient_factors)
    if uneven is not None:
        return Diagnosis("", uneven)
    expected_trace = reference.trace
    first = min(trace.gradients.keys() & expected_trace.gradients.keys(), default=0)
    allowed = reference.tolerances.gradients
    limits = Limits(allowed.base, {name: allowed.of(at_step(name, first)) for name in expected_trace.weights})
    few_rows = (probe.found, probe.expected, probe.ties, probe.limits)
    first_gradients = trace.gradients.get(first, {}), expected_trace.gradients.get(first, {})
    for found, expected, ties, at_most in [few_rows, (*first_gradients, expected_trace.ties, limits)]:
        wrong = _wrong_parameter(found, expected, ties, at_most)
        if wrong is not None:
            text = f"outputs and their gradients are equal, but the gradient of {wrong.name} is not: {wrong.text}"
            return Diagnosis(_module(wrong.name), text)
    named = next((fault for fault in comparison.faults if fault.name), None)
    if named is not None:
        return Diagnosis(_module(named.name), named.text)
    if "weights" in comparison.exceeded():  # gradients of later steps then differ for that reason alone
        name = comparison.weights.where
        return Diagnosis(_module(name), f"the first gradients are equal, but {name} is not, after the updates")
    if "gradients" in comparison.exceeded():
        name = comparison.gradients.where
        return Diagnosis(
            _module(name.partition(",")[0]), f"the first step is equal; later, the gradient of {name}, is not"
        )
    return Diagnosis("", "a step of few rows from the first weights is equal: other rows or later steps diverge")


def _uneven_loss(factors: Mapping[int, float]) -> str | None:
    """Text that names the rank which scales its loss otherwise than the first one; None if all do alike."""
    first = next(iter(factors), 0)
    for rank, factor in factors.items():
        if not math.isclose(factor, factors[first], rel_tol=1e-3):
            return (
                f"outputs are equal, but rank {rank} scales its loss, and so its gradients, by "
                f"{factor / factors[first]:.4g} times what rank {first} does: loss or num_targets depend on the rank"
            )
    return None


def _first_mismatch(probe: Probe, kind: str) -> ModuleDifference | None:
    """The first difference in the order of the reference. A shard that equals no slice of the full output may be
    sharded in an unknown way: it counts only if the full output of its nearest enclosing module differs, too."""
    places = {module: place for place, module in enumerate(probe.order[kind])}
    mismatches = sorted(
        (e for e in probe.mismatches if e.kind == kind), key=lambda e: (places.get(e.module, -1), e.rank)
    )
    differing = {mismatch.module for mismatch in mismatches if mismatch.whole}
    for mismatch in mismatches:
        around = mismatch.module
        while around and (kind, around) not in probe.agreed and around not in differing:
            around = _module(around)
        if mismatch.whole or around in differing:
            return mismatch
    return None


def _describe_shards(probe: Probe, mismatch: ModuleDifference) -> str:
    """Text naming the shards just before ``mismatch``: each equals some slice of the reference's, maybe a wrong one."""
    order = probe.order["output"]
    before: list[str] = []
    for module in order[: order.index(mismatch.module)]:
        if ("output", module) in probe.agreed:
            before = []
        elif ("output", module) in probe.agreed_shards:
            before.append(module)
    return f"; it takes shards from {', '.join(before)}" if before else ""


def _module(name: str) -> str:
    """The module that has this module or parameter as a member; empty for the model itself."""
    return name.rpartition(".")[0]


def _display_name(module: str) -> str:
    return module or "the model itself"


def _wrong_parameter(found: Tensors, expected: Tensors, ties: list[list[str]], limits: Limits) -> Fault | None:
    """The parameter whose gradient differs most, with a hint at the reason; None if no gradient exceeds its limit."""
    known = by_every_name(expected, ties)
    complete = by_every_name(found, ties)
    worst = Worst.of(gradient_differences({name: complete[name] for name in known if name in complete}, known), limits)
    if not worst.exceeds:
        return None
    name = worst.where
    others = [other for names in ties if name in names for other in names if other != name]
    separate = [other for other in others if other in found]
    if name in found and separate:
        return Fault(name, f"in one process it is tied to {', '.join(separate)}, and here it is not")
    gradient, wanted = complete[name].double(), known[name].double()
    if gradient.shape == wanted.shape and norm(wanted) > 0:
        factor = float((gradient * wanted).sum()) / norm(wanted) ** 2
        if norm(gradient) == 0:
            return Fault(name, "it is zero")
        if norm(gradient - factor * wanted) <= 10 * worst.limit * norm(gradient):
            return Fault(name, f"it is {factor:.3g} times what it should be")
    return Fault(name, f"it differs by {worst.value:.1e}, so it is not what the rows of all ranks add up to")
