"""Builds the pipeline stages of this rank from a task, for torch's pipeline and for DeepSpeed's."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.device_mesh import build_mesh
from drawbar.distributed.process_group import Distributed
from drawbar.engines.local_model import LocalModel, WeightSource, build_meta, load_first_weights
from drawbar.errors import UserError
from drawbar.models.lora import FrozenBaseInfo
from drawbar.models.plans import plan_for
from drawbar.parallel.model_plan import ModelParallelPlan, PipelinePlan
from drawbar.parallel.pipeline.inference import PipelineInference
from drawbar.parallel.pipeline.stages import LocalStages, blocks_of_stages, build_stage, is_tied
from drawbar.parallel.tensor import FusedLayout
from drawbar.runtime.log import logger
from drawbar.tasks.task import Task


@dataclass(frozen=True)
class EmptyStages:
    """The stages of this rank, without weights yet."""

    stage_modules: list[nn.Module]
    """In order: stage ``i``, and with interleaving ``i + P`` as well, on rank ``i`` of P."""
    meta_model: PreTrainedModel
    """The full model, without weights, that the stages are parts of."""
    plan: ModelParallelPlan
    mesh: DeviceMesh
    source: WeightSource
    base: FrozenBaseInfo | None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the model's stages, in their order."""
        return self.mesh["pp"].get_group()

    @property
    def hidden_size(self) -> int:
        return int(self.meta_model.config.get_text_config().hidden_size)

    @property
    def tied_name(self) -> str | None:
        """The name of the weight that first and last stage share, each with a copy; None if they share none."""
        assert self.plan.pipeline is not None, "the stages were cut by this plan"
        return f"{self.plan.pipeline.embedding}.weight" if is_tied(self.meta_model, self.plan.pipeline) else None

    def pipeline_inference(self, world: Distributed) -> PipelineInference:
        """For evaluation and generation through the stages; build it before FSDP or other hooks wrap them."""
        vocabulary = self.meta_model.config.get_text_config().vocab_size
        return PipelineInference(self.stage_modules, self.group, world.device, self.hidden_size, vocabulary)

    def load(
        self, fused: dict[str, FusedLayout], cross_entropy: str, world: Distributed
    ) -> tuple[LocalModel, nn.Parameter | None]:
        """The stages with their first weights, and this rank's copy of a weight that is tied, or None."""
        assert self.plan.pipeline is not None, "the stages were cut by this plan"
        module = LocalStages(self.stage_modules, self.meta_model, self.plan.pipeline)
        load_first_weights(module, self.source, fused, world)
        local = LocalModel(module, self.meta_model, self.base, fused, cross_entropy=cross_entropy)
        return local, dict(module.named_parameters()).get(self.tied_name or "")


def build_stages(task: Task, config: RunConfig, world: Distributed) -> EmptyStages:
    """Divide the task's model into stages; every rank calls it.

    Raises:
        UserError: the model cannot be split into that many stages, or a stage has no trainable parameter.
    """
    meta_model, source, base = build_meta(task, config, world)
    plan = plan_for(meta_model)
    if plan.pipeline is None:
        raise UserError(plan.pipeline_refusal, where="parallel.pipeline", remedy="set parallel.pipeline=1")
    assert isinstance(meta_model, PreTrainedModel), "only models of transformers have a pipeline plan"
    mesh = build_mesh(world.dims, world.device)
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
            f"the stages have {', '.join(map(str, blocks_per_stage))} blocks, and in one of them nothing is trained",
            where="parallel.pipeline",
            remedy="set parallel.pipeline=1 or other parallel.cuts, or train more modules",
        )
    return parts
