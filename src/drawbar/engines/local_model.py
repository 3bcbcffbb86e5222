"""``LocalModel``: the part of a task's model on one rank (full model, shards or stages), and how to build it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from transformers import PreTrainedModel

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.device_mesh import mesh_of, replica_groups
from drawbar.distributed.process_group import Distributed
from drawbar.engines.loss_choice import choose_cross_entropy
from drawbar.errors import UserError
from drawbar.models.embedding_noise import add_noise_to_embeddings
from drawbar.models.huggingface import weights_without_file
from drawbar.models.lora import (
    FrozenBaseInfo,
    add_adapters,
    add_adapters_and_fill,
    add_adapters_to_base,
    describe_adapters,
    pack_base,
)
from drawbar.models.packed import PACKED_FAMILIES, allow_packing
from drawbar.models.plans import plan_for
from drawbar.models.segments import use_known_padding
from drawbar.optim.groups import freeze
from drawbar.parallel.apply import parallelize
from drawbar.parallel.fp8 import compute_in_fp8
from drawbar.parallel.model_plan import ModelParallelPlan, PipelinePlan
from drawbar.parallel.pipeline.inference import PipelineInference
from drawbar.parallel.pipeline.stages import LocalStages, blocks_of_stages, build_stage, is_tied
from drawbar.parallel.precision import keep_trained_weights_in_fp32, store_frozen_weights_low
from drawbar.parallel.tensor import FusedLayout, fused_layouts
from drawbar.parallel.weights import broadcast_shards, expanded_empty, load_shard, materialize, named_tensors
from drawbar.runtime.log import logger
from drawbar.runtime.seed import note_host_generators
from drawbar.tasks.method_errors import is_user_defined, method_error
from drawbar.tasks.task import Task


class Unset:
    """Used as the source of weights if their values do not matter (``TaskContext.weightless``)."""


WeightSource: TypeAlias = Mapping[str, torch.Tensor] | nn.Module | Unset | None
"""Where the initial weights come from: tensors by name, or the full model (on rank 0; None on the others)."""

_UNKNOWN_BASE = FrozenBaseInfo(frozenset(), "")


HOST = torch.device("cpu")


@dataclass(frozen=True)
class LocalModel:
    """One rank's part of a model."""

    module: nn.Module
    """The full model, its shards (DTensor), or this rank's pipeline stages."""
    meta_model: nn.Module
    """A model with all names and full shapes, possibly without values; may be ``module`` itself."""
    base: FrozenBaseInfo | None
    """Digest of the frozen base model under LoRA, and the names of its parameters that the pretrained files lack (they
    are trained and saved); None without LoRA."""
    fused: dict[str, FusedLayout] = field(default_factory=dict)
    """Layouts of fused parameters, whose DTensors hold the rows in a different order than the full model and the
    files."""
    replica_groups: list[dist.ProcessGroup] = field(default_factory=list)
    """Process groups over which ``share_buffers`` synchronizes the model's buffers; none for pipeline stages."""
    cross_entropy: str = "plain"
    """The setting ``task.cross_entropy``, with ``auto`` resolved."""
    buffers: dict[str, torch.Size] = field(init=False)
    """Names and shapes of the module's persistent buffers when it was built; a resumed run can only load these."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", _persistent_buffers(self.module))

    @property
    def loss_in_head(self) -> bool:
        """Whether the model returns the loss for a batch with targets for its head."""
        return self.cross_entropy != "plain"

    def check_buffers(self, task: Task) -> None:
        """Raise UserError if training has added, removed or resized a persistent buffer, since a resumed run could not
        load the checkpoint."""
        now = _persistent_buffers(self.module)
        for name in sorted(self.buffers.keys() | now.keys()):
            before, after = self.buffers.get(name), now.get(name)
            if before != after:
                shapes = [str(list(shape)) if shape is not None else "none" for shape in (before, after)]
                raise method_error(
                    task,
                    "build_model",
                    f"returns a model whose checkpoints could not be loaded: the shape of its buffer {name} was "
                    f"{shapes[0]} when the model was built, and is {shapes[1]} after a forward pass",
                    "register it in the constructor with its final shape, or with persistent=False if it need not be "
                    "saved",
                )


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Size]:
    """Name → shape of the buffers in ``state_dict``."""
    saved = module.state_dict(keep_vars=True)
    return {name: buffer.shape for name, buffer in module.named_buffers(remove_duplicate=False) if name in saved}


def prepared_meta_model(meta_model: nn.Module, config: RunConfig, base: FrozenBaseInfo | None) -> nn.Module:
    """The meta model as the run trains it: with any LoRA adapters, frozen parameters, and trained weights in fp32.

    Args:
        base: see ``LocalModel``.
    """
    if config.lora is not None and base is not None:
        add_adapters(meta_model, config.lora, base.without_file)
        pack_base(meta_model, config.lora)
    freeze(meta_model, config.optim)
    keep_trained_weights_in_fp32(meta_model)
    return meta_model


def build_model(task: Task) -> nn.Module:
    """The task's model, after ``task_context.change_model``.

    Raises:
        UserError: ``task.build_model`` does not return a module, or the module has no values or has parameters that
            cannot be trained.
    """
    model = _checked_module(task, "build_model", task.build_model())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise method_error(
                task,
                "build_model",
                f"returns a model with a parameter or buffer that has no shape yet: {name}, of a lazy module",
                "use a module with explicit sizes, or call the model once on a sample before returning it",
            )
        if tensor.requires_grad and not tensor.is_floating_point():
            raise method_error(
                task,
                "build_model",
                f"returns a model whose parameter {name} is {tensor.dtype}, which drawbar's optimizers do not support",
                "store it as floats (torch.view_as_real), and convert it to complex numbers in forward",
            )
    without = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if without is not None:
        raise method_error(
            task,
            "build_model",
            f"returns a model without values: {without} is on the meta device",
            "build it on the CPU; drawbar itself uses the meta device for sharded models",
        )
    return _apply_change_model(task, model)


def build_meta_model(task: Task) -> nn.Module:
    """The task's model without its weights, after ``task_context.change_model``."""
    method = "build_meta_model" if is_user_defined(task, "build_meta_model") else "build_model"
    return _apply_change_model(task, _checked_module(task, method, task.build_meta_model()))


def _checked_module(task: Task, method: str, model: object) -> nn.Module:
    """Return the model if it is a module; else raise ``UserError``."""
    if not isinstance(model, nn.Module):
        raise method_error(
            task,
            method,
            f"returns {type(model).__name__}, not a torch.nn.Module",
            "return the model that it builds",
        )
    return model


def _apply_change_model(task: Task, model: nn.Module) -> nn.Module:
    task.task_context.change_model(model)
    for parameter in model.parameters():
        # fused optimizers, ZeRO-1 and checkpoints read a parameter's elements in memory order
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    _make_buffers_contiguous(model)
    return model


def _make_buffers_contiguous(model: nn.Module) -> None:
    """Make expanded buffers contiguous: nothing can be loaded or broadcast into an expanded tensor."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_contiguous():
                module._buffers[name] = made.setdefault(id(buffer), buffer.contiguous())


def _build_adapted(task: Task, config: RunConfig) -> tuple[nn.Module, FrozenBaseInfo | None]:
    """The full model, with any LoRA adapters of the run, and the identity of their base model (None without LoRA)."""
    if task.task_context.weightless:
        meta_model, base = build_weightless(task, config)
        materialize(meta_model, HOST, HOST)
        return meta_model, base
    model, base = _read_adapted(task, config) or _compute_adapted(task, config)
    if config.lora is not None and task.task_context.trains:
        logger.info(describe_adapters(model))
    freeze(model, config.optim)
    low = keep_trained_weights_in_fp32(model)
    if low:
        dtypes = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in low))
        logger.warning(
            "%s.build_model returns trained weights in %s: they are kept in fp32; the setting precision chooses the "
            "dtype of their matrix products",
            type(task).__name__,
            dtypes,
        )
    return model, base


def _compute_adapted(task: Task, config: RunConfig) -> tuple[nn.Module, FrozenBaseInfo | None]:
    model = build_model(task)
    if config.lora is None:
        return model, None
    return model, add_adapters_to_base(model, config.lora, weights_without_file(model))


def _read_adapted(task: Task, config: RunConfig) -> tuple[nn.Module, FrozenBaseInfo] | None:
    """The same model under LoRA if its base can be read from files instead of built: tensor by tensor, in its final
    dtypes, with half the memory of fp32. None if ``build_model`` must build it."""
    own_base = is_user_defined(task, "build_model") and not is_user_defined(task, "stored_weights")
    if config.lora is None or own_base:
        return None
    put_generators_back = note_host_generators()
    model = build_meta_model(task)
    weights = _stored_weights(task, model)
    put_generators_back()
    if weights is None:
        return None
    materialize(model, HOST, HOST, expanded_empty)
    precision = config.precision if task.task_context.trains else "fp32"
    return model, add_adapters_and_fill(model, config.lora, weights, precision)


def _stored_weights(task: Task, meta_model: nn.Module) -> Mapping[str, torch.Tensor] | None:
    """The source of all of the model's initial weights; None if ``build_model`` must make them."""
    if any(buffer.is_meta for buffer in meta_model.buffers()):
        return None  # it was computed from a parameter, and files only contain parameters
    return task.stored_weights(meta_model)


def build_weightless(task: Task, config: RunConfig) -> tuple[nn.Module, FrozenBaseInfo | None]:
    """The model on the meta device, with any adapters of the run on an unknown base."""
    base = None if config.lora is None else _UNKNOWN_BASE
    return prepared_meta_model(build_meta_model(task), config, base), base


def prepare_attention(model: nn.Module, task: Task, config: RunConfig) -> None:
    """Prepare the model for rows of several segments where there are such; for padded rows, let it take from the
    host whether there is any padding."""
    if not isinstance(model, PreTrainedModel):
        return
    if getattr(task.config, "embedding_noise", 0):
        add_noise_to_embeddings(model)
    if model.config.model_type in PACKED_FAMILIES:
        use_known_padding(model)
    padding_free = config.data.padding_free is True
    if not (padding_free or config.data.batching == "packed" or task.has_segments):
        return
    try:
        allow_packing(model, per_sample=task.label_placement == "sample", with_row_mask=not padding_free)
    except UserError as error:
        if not task.has_segments:
            raise
        remedy = "name a model of another family: each sample of this task is a row of several sequences"
        raise UserError(error.what, where="task.model", remedy=remedy) from error


def apply_dtypes(model: nn.Module, task: Task, config: RunConfig) -> None:
    """Under LoRA, store frozen weights in the run's precision; with ``parallel.fp8``, make linear layers multiply in
    fp8. Autocast handles all other dtypes. Call before the model is parallelized."""
    if not task.task_context.trains:
        return
    store_frozen_weights_low(model, config)
    if config.parallel.fp8 is not None:
        compute_in_fp8(model, config.parallel.fp8)


def build_whole(task: Task, config: RunConfig, world: Distributed, device: torch.device) -> LocalModel:
    """Build the full model on every rank. Built on the CPU, so that it starts from the same random numbers on every
    device."""
    with world.barrier_after("building the model"):
        model, base = _build_adapted(task, config)
        prepare_attention(model, task, config)
        cross_entropy = choose_cross_entropy(task, config, model, [model])
        apply_dtypes(model, task, config)
        parallelize(model, plan_for(model), config.parallel, ParallelDims(), None, config.precision)
        if device != HOST:
            model = model.to(device)
    base = world.from_rank0(lambda: base, "building the model")  # all ranks receive rank 0's weights
    return LocalModel(model, model, base, {}, [dist.group.WORLD] if world.size > 1 else [], cross_entropy)


def build_shards(task: Task, config: RunConfig, world: Distributed, mesh: DeviceMesh) -> LocalModel:
    """Build this rank's shards of the model.

    Without LoRA, if the task knows the weight files, each rank reads its shards; otherwise rank 0 builds the full model
    and broadcasts it tensor by tensor, and every rank keeps its shards.
    """
    model, source, base = build_meta(task, config, world)
    prepare_attention(model, task, config)
    cross_entropy = choose_cross_entropy(task, config, model, [model])
    apply_dtypes(model, task, config)
    parallelize(model, plan_for(model), config.parallel, world.dims, mesh, config.precision)
    fused = fused_layouts(model)
    materialize(model, torch.device("cpu") if config.parallel.offload else world.device, world.device)
    load_first_weights(model, source, fused, world)
    return LocalModel(model, model, base, fused, replica_groups(mesh), cross_entropy)


def load_first_weights(
    module: nn.Module,
    source: WeightSource,
    fused: Mapping[str, FusedLayout],
    world: Distributed,
) -> None:
    """Load the initial weights of this rank's part of the model from the source that ``build_meta`` returned."""
    if isinstance(source, Unset):
        return
    if isinstance(source, Mapping):
        with world.barrier_after("reading the weights"):
            for name, parameter in module.named_parameters():
                load_shard(parameter, source, name, fused.get(name))
    else:
        broadcast_shards(named_tensors(module), source, fused, world.device)


def build_meta(
    task: Task, config: RunConfig, world: Distributed
) -> tuple[nn.Module, WeightSource, FrozenBaseInfo | None]:
    """The model on the meta device; the source of its weights (files, or the full model on rank 0); and the identity of
    the base model under its LoRA adapters (None without LoRA)."""
    if task.task_context.weightless:
        meta_model, base = build_weightless(task, config)
        return meta_model, Unset(), base
    files = None
    if config.lora is None:
        put_generators_back = note_host_generators()
        with world.working("finding the weights"):
            meta_model = prepared_meta_model(build_meta_model(task), config, None)
            files = _stored_weights(task, meta_model)
        if world.sum(files is not None) == world.size:
            return meta_model, files, None
        put_generators_back()
    # build the full model first: it must draw the same random numbers as in a single-process run
    with world.barrier_after("building the model"):
        source, base = _build_adapted(task, config) if world.is_rank0 else (None, None)
    base = world.from_rank0(lambda: base, "building the model")
    with world.barrier_after("building the model"):
        meta_model = prepared_meta_model(build_meta_model(task), config, base)
    logger.info("weights: rank 0 builds the model, and sends each process its part")
    return meta_model, source, base


@dataclass(frozen=True)
class EmptyStages:
    """The stages of this rank, before their weights are loaded."""

    stage_modules: list[nn.Module]
    """In order: stage ``i``, and with interleaving also ``i + P``, on rank ``i`` of P."""
    meta_model: PreTrainedModel
    """The full model, without weights, that the stages are part of."""
    plan: ModelParallelPlan
    mesh: DeviceMesh
    source: WeightSource
    base: FrozenBaseInfo | None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the model's stages, in stage order."""
        return self.mesh["pp"].get_group()

    @property
    def hidden_size(self) -> int:
        return int(self.meta_model.config.get_text_config().hidden_size)

    @property
    def tied_name(self) -> str | None:
        """The name of the weight that first and last stage share, each with its copy; None if they share none."""
        assert self.plan.pipeline is not None, "the stages were cut by this plan"
        return f"{self.plan.pipeline.embedding}.weight" if is_tied(self.meta_model, self.plan.pipeline) else None

    def pipeline_inference(self, world: Distributed) -> PipelineInference:
        """For evaluation and generation through the stages; create it before FSDP or other hooks wrap them."""
        vocabulary = self.meta_model.config.get_text_config().vocab_size
        return PipelineInference(self.stage_modules, self.group, world.device, self.hidden_size, vocabulary)

    def load(
        self, fused: dict[str, FusedLayout], cross_entropy: str, world: Distributed
    ) -> tuple[LocalModel, nn.Parameter | None]:
        """The stages with their initial weights, and this rank's copy of a tied weight, or None."""
        assert self.plan.pipeline is not None, "the stages were cut by this plan"
        module = LocalStages(self.stage_modules, self.meta_model, self.plan.pipeline)
        load_first_weights(module, self.source, fused, world)
        local = LocalModel(module, self.meta_model, self.base, fused, cross_entropy=cross_entropy)
        return local, dict(module.named_parameters()).get(self.tied_name or "")


def build_stages(task: Task, config: RunConfig, world: Distributed) -> EmptyStages:
    """Split the task's model into stages. Collective.

    Raises:
        UserError: the model cannot be split into that many stages, or a stage has no trainable parameter.
    """
    meta_model, source, base = build_meta(task, config, world)
    plan = plan_for(meta_model)
    if plan.pipeline is None:
        raise UserError(plan.pipeline_refusal, where="parallel.pipeline", remedy="set parallel.pipeline=1")
    assert isinstance(meta_model, PreTrainedModel), "only models of transformers have a pipeline plan"
    mesh = mesh_of(world)
    parts = _build_stage_modules(meta_model, plan.pipeline, config, world, mesh["pp"].get_local_rank())
    return EmptyStages(parts, meta_model, plan, mesh, source, base)


def _build_stage_modules(
    meta_model: nn.Module, plan: PipelinePlan, config: RunConfig, world: Distributed, rank: int
) -> list[nn.Module]:
    parallel, ranks = config.parallel, world.dims.pp
    stages = ranks * (2 if parallel.schedule == "interleaved" else 1)
    blocks_per_stage = blocks_of_stages(meta_model, plan, stages, parallel.cuts)
    logger.info("pipeline: stages of %s blocks", ", ".join(map(str, blocks_per_stage)))
    parts = [build_stage(meta_model, plan, blocks_per_stage, stage) for stage in range(rank, stages, ranks)]
    idle = sum(not any(parameter.requires_grad for parameter in part.parameters()) for part in parts)
    if world.sum(idle):
        raise UserError(
            f"the stages have {', '.join(map(str, blocks_per_stage))} blocks, and one has no trained parameters",
            where="parallel.pipeline",
            remedy="set parallel.pipeline=1 or other parallel.cuts, or train more modules",
        )
    return parts
