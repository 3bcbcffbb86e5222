"""A model in stages, on ranks that pass hidden states on to one another: pipeline parallelism."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from drawbar.data.loader import MicroBatch
from drawbar.engines.build import build_structure, fill_parts, pack
from drawbar.engines.native import NativeEngine, number
from drawbar.engines.results import EngineState, EvalResult
from drawbar.errors import UserError
from drawbar.models.plans import plan_for
from drawbar.optim.state import check_optimizer_state
from drawbar.parallel.apply import parallelize
from drawbar.parallel.fsdp import free_gathered
from drawbar.parallel.gradients import squared_norm
from drawbar.parallel.pipeline_inference import PipelineInference
from drawbar.parallel.pipeline_schedule import Pipeline, add_up_tied
from drawbar.parallel.precision import autocast
from drawbar.parallel.stages import LocalStages, cut_stage, is_tied, split_layers
from drawbar.parallel.tensor import packed_parameters
from drawbar.parallel.weights import check_weights, load_shard, materialize
from drawbar.runtime.log import logger
from drawbar.runtime.mesh import ParallelDims, build_mesh
from drawbar.runtime.plan import PipelinePlan
from drawbar.runtime.safetensors_reader import TensorFiles
from drawbar.tasks.batch import Ask, Batch


class PipelineEngine(NativeEngine):
    """Pipeline parallelism, with the strategies ``single``, ``ddp`` and ``fsdp`` and tensor parallelism inside stages.

    All ranks of a pipeline get the same batches, and call everything equally often. The last stage has the loss.

    Raises:
        UserError: the model cannot be cut into stages, or not into so many, or nothing is trained in one of them.
    """

    def _build(self, dims: ParallelDims) -> None:
        task, config, world = self.task, self.config, self.world
        self.is_sharded = config.parallel.strategy == "fsdp"
        self.structure, source, self.base = build_structure(task, config, world)
        plan = plan_for(self.structure)
        if plan.pipeline is None:
            raise UserError(plan.refusal, where="parallel.pipeline", remedy="set parallel.pipeline=1")
        mesh = build_mesh(dims, world.device)
        self.group = mesh["pp"].get_group()
        parts = self._cut(plan.pipeline, dims.pp)
        self._connect(parts)
        for part in parts:
            pack(part, task, config)
            parallelize(part, plan, config.parallel, dims, mesh, self.precision)
            self.packed |= packed_parameters(part)
            materialize(part, torch.device("cpu") if config.parallel.offload else world.device, world.device)
        module = LocalStages(parts, self.structure, plan.pipeline)
        fill_parts(module, source, self.packed, world)
        tied = f"{plan.pipeline.embedding}.weight" if is_tied(self.structure, plan.pipeline) else ""
        self.tied = dict(module.named_parameters()).get(tied)  # on the first and the last stage
        self.module = self.model = module

    def _cut(self, plan: PipelinePlan, ranks: int) -> list[nn.Module]:
        parallel = self.config.parallel
        stages = ranks * (2 if parallel.schedule == "interleaved" else 1)
        layers = split_layers(self.structure, plan, stages, parallel.cuts)
        logger.info("pipeline: stages of %s blocks", ", ".join(map(str, layers)))
        parts = [cut_stage(self.structure, plan, layers, stage) for stage in range(self.group.rank(), stages, ranks)]
        idle = sum(not any(parameter.requires_grad for parameter in part.parameters()) for part in parts)
        if self.world.sum(idle):
            raise UserError(
                f"the stages have {', '.join(map(str, layers))} blocks, and in one of them nothing is trained",
                where="parallel.pipeline",
                remedy="set parallel.pipeline=1 or other parallel.cuts, or train more modules",
            )
        return parts

    def _connect(self, parts: list[nn.Module]) -> None:
        assert isinstance(self.structure, PreTrainedModel)
        config = self.structure.config.get_text_config()
        device, width, parallel = self.world.device, config.hidden_size, self.config.parallel
        reshard = parallel.reshard is True
        self.pipeline = Pipeline(parts, parallel.schedule, self.group, device, width, self.precision, reshard)
        self.relay = PipelineInference(parts, self.group, device, width, config.vocab_size)
        if self.is_sharded:
            # a rank whose texts have ended must go on taking part in the others' forwards
            self.relay.model.generate = partial(self.relay.model.generate, synced_gpus=True)

    def _accumulate_gradients(self, micro_batches: list[MicroBatch[Batch]], divisor: float) -> torch.Tensor:
        fewest = min(micro_batches, key=lambda micro: next(iter(micro.batch.values())).numel())
        missing = self.pipeline.fitting(len(micro_batches)) - len(micro_batches)
        micro_batches = micro_batches + [MicroBatch(fewest.batch, counts=False)] * missing
        batches = [micro.batch.to(self.world.device) for micro in micro_batches]
        forwards = [self._forward(batch) for batch in batches]
        loss_sum = torch.zeros((), device=self.world.device)
        # replicas and FSDP average over the data-parallel ranks, the contract wants the sum
        scale = self.scaler.scale * self.world.data.size / divisor

        def compute_loss(logits: torch.Tensor, index: int) -> torch.Tensor:
            loss = number(self.task.loss(self.relay.outputs(forwards[index], logits), batches[index]))
            if not micro_batches[index].counts:
                loss = loss * 0
            loss_sum.add_(loss.detach())
            return loss * scale

        inputs = [self.relay.inputs(forward) for forward in forwards]
        with self._cut_logits():
            self.pipeline.run(inputs, compute_loss)
        return loss_sum

    def _forward(self, batch: Batch) -> Callable[[nn.Module], Any]:
        return lambda model: self.task.forward(model, batch)

    def _squared_norm(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        """Over all stages. The gradients of the two copies of a tied weight become one, which counts once."""
        rank, last = self.group.rank(), self.group.size() - 1
        counted = parameters
        if self.tied is not None and self.tied.grad is not None:
            gradient = self.tied.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            add_up_tied(local, last - rank, self.group)
            if rank == last:
                counted = [parameter for parameter in parameters if parameter is not self.tied]
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        total = squared_norm(gradients, self.world.device)
        dist.all_reduce(total, group=self.group)
        return total

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> EvalResult:
        self._evaluate()
        weight = self.task.weight(batch)
        batch = batch.to(self.world.device)
        forward = self._forward(batch)
        with free_gathered(self.module), autocast(self.precision, self.world.device):
            logits = self.relay.logits(self.relay.inputs(forward))
            loss = 0.0 if logits is None else float(self.task.loss(self.relay.outputs(forward, logits), batch))
            predictions = None
            if self.task.predicts:
                with self.relay.same_chance():
                    predictions = self.task.predict(self.relay.model, batch)
        return EvalResult(loss=loss, weight=weight, predictions=predictions)

    @torch.no_grad()
    def predict_step(self, batch: Batch, ask: Ask) -> list[Any]:
        self._evaluate()
        with free_gathered(self.module), autocast(self.precision, self.world.device), self.relay.same_chance():
            return ask(self.relay.model, batch.to(self.world.device))

    @torch.no_grad()
    def generate(self, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        self._evaluate()
        moved = {name: tensor.to(self.world.device) for name, tensor in inputs.items()}
        with free_gathered(self.module), autocast(self.precision, self.world.device), self.relay.same_chance():
            return self.relay.model.generate(**moved, **options)

    def _evaluate(self) -> None:
        self.module.eval()
        self.relay.model.eval()

    def _keeps_full_copy(self, writers: Sequence[int]) -> bool:
        """Whether this rank speaks for its stage: the writers get what these collect."""
        at = self.world.dims.coordinates(self.world.rank)
        return all(number == 0 for axis, number in at.items() if axis != "pp")

    def _model_copies(self, writers: Sequence[int]) -> dict[str, torch.Tensor]:
        found = self.world.collect(super()._model_copies(writers), writers)
        model = {}
        if self.world.rank in writers:
            first: dict[int, str] = {}  # a tied weight has two names, and one of them was collected
            for name, tensor in self._saved(self.structure).items():
                model[name] = found[first.setdefault(id(tensor), name)]
        return model

    def _optimizer_copies(self, writers: Sequence[int]) -> dict[str, torch.Tensor]:
        return self.world.collect(super()._optimizer_copies(writers), writers)

    def gradients(self) -> dict[str, torch.Tensor]:
        return self.world.collect(super().gradients())

    def load(self, state: EngineState) -> None:
        trained = {name for name, parameter in self.structure.named_parameters() if parameter.requires_grad}
        check_optimizer_state(trained, state.optimizer)
        own = set(self._names().values())
        names = [name for name in state.optimizer if name.rpartition("/")[0] in own]
        super().load(EngineState(state.model, _only(state.optimizer, names), state.values))

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_weights(self._saved(self.structure), tensors)
        for name, tensor in self._saved(self.module).items():
            load_shard(tensor, tensors, name, self.packed.get(name))

    def export(self, folder: Path, base_name: str, merge: bool) -> None:
        raise UserError(
            "no process has the whole model to export",
            where="parallel.pipeline",
            remedy="set parallel.pipeline=1: any strategy reads the checkpoints of a pipeline",
        )


def _only(tensors: Mapping[str, torch.Tensor], names: list[str]) -> Mapping[str, torch.Tensor]:
    if isinstance(tensors, TensorFiles):
        return tensors.renamed({name: name for name in names})
    return {name: tensors[name] for name in names}
