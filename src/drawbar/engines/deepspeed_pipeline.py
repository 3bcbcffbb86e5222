"""Pipeline × tensor × data parallelism on DeepSpeed: its ``PipelineModule`` over this program's stages."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from drawbar.config.deepspeed_json import deepspeed_json
from drawbar.engines.build import build_structure, fill_parts, pack
from drawbar.engines.deepspeed import DeepSpeedEngine
from drawbar.engines.pipeline import PipelineEngine
from drawbar.errors import UserError
from drawbar.models.plans import plan_for
from drawbar.optim.optimizers import build_optimizers
from drawbar.parallel.apply import parallelize
from drawbar.parallel.deepspeed_stages import (
    DeepSpeedPipeline,
    Stage,
    cast_received,
    check_layers,
    cut_layers,
    pipeline_module,
)
from drawbar.parallel.deepspeed_state import FlatMasters, Masters, import_deepspeed, start
from drawbar.parallel.pipeline_inference import PipelineInference
from drawbar.parallel.precision import LossScaler
from drawbar.parallel.stages import LocalStages, is_tied
from drawbar.parallel.weights import materialize
from drawbar.runtime.log import logger
from drawbar.runtime.mesh import ParallelDims, build_mesh

_FOR_PIPELINES: dict[str, Any] = {
    # else it cuts hidden states over the tensor-parallel ranks, by the shapes of the first step
    "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    "steps_per_print": None,  # with any number it prints the first step's loss
}


class DeepSpeedPipelineEngine(PipelineEngine, DeepSpeedEngine):
    """The strategy ``deepspeed`` with a pipeline: ZeRO stage 0 or 1, and AutoTP's layers inside the stages.

    Steps are DeepSpeed's; evaluation and generation go through the stages in turn, as in every pipeline.

    Raises:
        UserError: DeepSpeed is missing or refuses the run, or the model cannot be cut so.
    """

    def _build(self, dims: ParallelDims) -> None:
        task, config, world = self.task, self.config, self.world
        import_deepspeed(world.device).init_distributed(dist_init_required=False)
        self.scaler = LossScaler("fp32")  # DeepSpeed scales by itself
        self.dims = dims
        self.structure, source, self.base = build_structure(task, config, world)
        plan = plan_for(self.structure)
        if plan.pipeline is None:
            raise UserError(plan.refusal, where="parallel.pipeline", remedy="set parallel.pipeline=1")
        if dims.tp > 1:
            check_layers(self.structure, plan, dims.tp)
        mesh = build_mesh(dims, world.device)
        self.group = mesh["pp"].get_group()
        parts = self._cut(plan.pipeline, dims.pp)
        self._connect(parts)
        (part,) = parts
        pack(part, task, config)
        cast_received(part)
        materialize(part, torch.device("cpu"), torch.device("cpu"))  # DeepSpeed casts and moves it
        module = LocalStages(parts, self.structure, plan.pipeline)
        fill_parts(module, source, {}, world)
        tied = f"{plan.pipeline.embedding}.weight" if is_tied(self.structure, plan.pipeline) else ""
        self.tied = dict(module.named_parameters()).get(tied)  # on the first and the last stage
        if dims.tp > 1:
            cut_layers(part, plan, self.tied, mesh["tp"].get_group())
        parallelize(part, plan, config.parallel, ParallelDims(), None, self.precision)
        self.module = module
        self.layer = Stage(part, self.group.rank(), dims.pp)

    def _connect(self, parts: list[nn.Module]) -> None:
        assert isinstance(self.structure, PreTrainedModel)
        text = self.structure.config.get_text_config()
        self.relay = PipelineInference(parts, self.group, self.world.device, text.hidden_size, text.vocab_size)

    def _build_optimizers(self) -> list[Optimizer]:
        optimizers = build_optimizers(self.module, self.config.optim)
        self._check_groups(optimizers[0])
        found = deepspeed_json(self.config, self.world.size, self.precision)
        for note in found.notes:
            logger.warning("deepspeed: %s", note)
        values = {**found.values, **_FOR_PIPELINES}
        values.pop("tensor_parallel", None)  # the layers are cut
        module = pipeline_module(self.layer, self.tied, self.dims)
        exact = {parameter: parameter.detach() for parameter in self.module.parameters()}
        self.model = start(module, optimizers[0], values, self.world.device, in_pieces=False)
        pipeline: Any = DeepSpeedPipeline(self.model, self.layer, self.world.device, self.precision)
        self.pipeline = pipeline
        # in bf16 its pipeline has an optimizer of its own, with flat buffers in stage 0 too
        is_flat = hasattr(self.model.optimizer, "bf16_groups")
        self.masters = FlatMasters(self.model) if is_flat else Masters.of(self.model)
        if self.precision != "fp32":  # its fp32 weights are copies of those that it cast
            for parameter, weight in exact.items():
                self.masters.set_weight(parameter, weight)
        return [self.model.optimizer]

    def _check_groups(self, optimizer: Optimizer) -> None:
        """DeepSpeed takes the norm of one group after another, each over all stages."""
        number = len(optimizer.param_groups)
        if self.world.largest(number) != -self.world.largest(-number):
            raise UserError(
                "some stages train matrices as well as norms or biases, others only one of the two: "
                "DeepSpeed's norm of the gradient needs both or one in all of them",
                where="parallel.strategy=deepspeed",
                remedy="set parallel.strategy=ddp, or train the same modules in every stage",
            )

    load_model = DeepSpeedEngine.load_model
