"""DeepSpeed's pipeline (``deepspeed.pipe``) over drawbar's stages, and its tensor-parallel layers inside them.

To DeepSpeed, each stage is one layer. DeepSpeed passes one tensor from each layer to the next; a stage takes masks,
positions and labels from its own copy of the micro-batch, which every rank of a pipeline has.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drawbar.config.parallel_dims import ParallelDims
from drawbar.deepspeed.state import is_tp_shard
from drawbar.errors import UserError
from drawbar.parallel.model_plan import ModelParallelPlan, Style
from drawbar.parallel.pipeline.schedule import Inputs, Loss
from drawbar.parallel.precision import autocast
from drawbar.parallel.tensor import check_degree
from drawbar.util.module_patterns import matching


class Stage(nn.Module):
    """One stage as a DeepSpeed layer: from hidden states (B, L, H) to hidden states, or to the loss in the last
    stage.

    Args:
        stage_module: from ``parallel.pipeline.stages.build_stage``.
        number: of this stage.
        stages: how many there are.
    """

    def __init__(self, stage_module: nn.Module, number: int, stages: int) -> None:
        super().__init__()
        self.stage_module = stage_module
        self.number = number
        self.is_first = number == 0
        self.is_last = number == stages - 1
        self._waiting: Iterator[tuple[int, Inputs]] = iter(())
        self._loss: Loss | None = None

    def expect(self, inputs: Sequence[Inputs], loss: Loss) -> None:
        """Set the micro-batches of the next forward calls: DeepSpeed's schedules run forwards in order.

        Args:
            loss: called only on the last stage.
        """
        self._waiting, self._loss = iter(enumerate(inputs)), loss

    def forward(self, received: Tensor) -> Tensor:
        index, inputs = next(self._waiting)
        out: Tensor = self.stage_module(**inputs) if self.is_first else self.stage_module(received, **inputs)
        if not self.is_last:
            return out
        assert self._loss is not None, "expect() comes before the forwards of a step"
        return self._loss(out, index)


def cast_received(stage_module: nn.Module) -> None:
    """Let a stage take hidden states of any dtype: those between the stages of an evaluation are fp32."""

    def cast(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        return tuple(hidden_BLH.to(dtype) for hidden_BLH in args)

    stage_module.register_forward_pre_hook(cast, prepend=True)


def pipeline_module(stage: Stage, tied: nn.Parameter | None, dims: ParallelDims) -> nn.Module:
    """DeepSpeed's ``PipelineModule``, with only this rank's own stage.

    Args:
        tied: this rank's copy of the weight that first and last stage share; None on other ranks.
    """
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=dims.pp, num_mp=dims.tp, num_dp=dims.dp_size)
    layers = [stage if number == stage.number else nn.Identity() for number in range(dims.pp)]
    with redirect_stdout(StringIO()):  # it prints what it does
        module: Any = PipelineModule(layers, topology=topology, partition_method="uniform", dynamic_shape=True)
    group = _ends(topology.get_axis_comm_lists("pipe"))
    # replaces DeepSpeed's tied layers, for which embedding and head would have to be separate layers
    module.get_tied_weights_and_groups = lambda: _tied_gradients(tied, group)
    _mark_counted_once(stage, tied, module.mpu().get_slice_parallel_rank() == 0)
    return module


def _ends(pipelines: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
    """The group of first and last stage of this rank's pipeline. Every rank makes the groups of all pipelines."""
    own = None
    for ranks in pipelines:
        group = dist.new_group([ranks[0], ranks[-1]])
        if dist.get_rank() in (ranks[0], ranks[-1]):
            own = group
    return own


def _tied_gradients(tied: nn.Parameter | None, group: dist.ProcessGroup | None) -> list[tuple[Any, Any]]:
    """Pairs (weight, group): DeepSpeed sums the weight's ``grad`` over the group. Some of its optimizers keep gradients
    elsewhere, so the pair has a stand-in for the weight, whose ``grad`` is that gradient."""
    if tied is None or not tied.requires_grad:
        return []
    places = [getattr(tied, name, None) for name in ("_hp_grad", "grad_accum", "grad")]
    gradient = next(place for place in places if place is not None)
    return [(SimpleNamespace(grad=gradient, _hp_grad=gradient), group)]


def _mark_counted_once(stage: Stage, tied: nn.Parameter | None, is_tp_rank0: bool) -> None:
    """Mark parameters so that DeepSpeed counts each gradient once in the global norm.

    DeepSpeed's optimizers understand ``ds_pipe_replicated``; under ZeRO stage 0, on all but the first of
    the ranks that hold one model, its clipping counts only parameters with ``model_parallel``.
    """
    for parameter in stage.parameters():
        mark: Any = parameter
        mark.ds_pipe_replicated = parameter is tied and not stage.is_first
        mark.model_parallel = not mark.ds_pipe_replicated and (is_tp_rank0 or is_tp_shard(parameter))


class DeepSpeedPipeline:
    """What ``schedule.Pipeline`` does, done by DeepSpeed's engine: its 1F1B, and its averages over the ranks.

    DeepSpeed's ``train_batch`` is made to end when the gradients are complete; then ``engine.step()`` updates.

    Args:
        engine: from a ``pipeline_module`` with this stage.
    """

    def __init__(self, engine: Any, stage: Stage, device: torch.device, precision: str) -> None:
        from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule

        class WithoutUpdate(TrainSchedule):
            def steps(self) -> Iterator[list[Any]]:
                for commands in super().steps():
                    yield [command for command in commands if not isinstance(command, OptimizerStep)]

        self.engine = engine
        self.stage = stage
        self.device = device
        self.precision = precision
        engine._train_schedule = lambda: WithoutUpdate(engine.micro_batches, engine.num_stages, engine.stage_id)
        engine.step = engine._exec_optimizer_step

    def run(self, inputs: Sequence[Inputs], loss: Loss) -> None:
        """Forward and backward of all micro-batches, with the gradients averaged over the data-parallel
        ranks."""
        engine = self.engine
        divided_by = engine.gradient_accumulation_steps()  # DeepSpeed divides the loss by this, from its JSON

        def compute_loss(logits: Tensor, number: int) -> Tensor:
            with autocast(self.precision, self.device):
                return loss(logits, number) * divided_by

        self.stage.expect(inputs, compute_loss)
        engine.micro_batches = len(inputs)
        nothing = torch.zeros(1)  # it asks for inputs and labels
        engine.train_batch(iter([(nothing, nothing)] * len(inputs)))


def check_layers(model: nn.Module, plan: ModelParallelPlan, degree: int) -> None:
    """Refuse a model that ``shard_layers`` cannot shard.

    Args:
        model: whole, without values.

    Raises:
        UserError: the model has no tensor plan, or DeepSpeed has no layers for it, or the degree does not divide it.
    """
    if plan.tensor is None:
        raise UserError(plan.tensor_refusal, where="parallel.tensor", remedy="set parallel.tensor=1")
    if plan.fused:
        raise UserError(
            f"DeepSpeed's tensor parallelism cannot cut {next(iter(plan.fused))}, which holds several layers in one",
            where="parallel.strategy=deepspeed, parallel.tensor",
            remedy=f"set parallel.strategy=ddp with parallel.tensor={degree}, or parallel.tensor=1",
        )
    dims = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1}
    sizes = {
        f"the width of {name}": module.weight.shape[dims[style]]
        for name, module, style in _styled(model, plan.tensor)
        if style in dims
    }
    check_degree({**plan.divisible_sizes, **sizes}, degree)


def shard_layers(
    stage_module: nn.Module, plan: ModelParallelPlan, tied: nn.Parameter | None, group: dist.ProcessGroup
) -> None:
    """Shard the layers of a stage over tensor-parallel ranks, in place, by the layers of DeepSpeed's AutoTP.

    The plan says which: AutoTP's own rules look at whole models. The token embedding stays whole.

    Args:
        stage_module: with its weights, whole.
        tied: the head's weight, where it is the embedding's as well and stays whole too.
    """
    from deepspeed.module_inject.layers import set_autotp_mode

    set_autotp_mode(training=True)
    for name, module, style in list(_styled(stage_module, plan.tensor or {})):
        if style == "replicated":
            for parameter in module.parameters():
                parameter.register_hook(_summed_over(group))
        elif module.weight is not tied:
            stage_module.set_submodule(name, _layer(module, style, group, name))


def _styled(stage_module: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[str, nn.Module, Style]]:
    """The layers to change. They have weights: the placeholders for other stages' layers have none."""
    for name, module, style in matching(list(stage_module.named_modules()), styles):
        if "weight" in module._parameters and style != "embedding":
            yield name, module, style


def _layer(module: nn.Module, style: Style, group: dist.ProcessGroup, name: str) -> nn.Module:
    from deepspeed.module_inject import layers

    match style:
        case "colwise":
            return layers.LinearLayer(module, group, name=name)
        case "colwise_gather_output" | "vocabulary":
            return layers.LinearLayer(module, group, name=name, gather_output=True)
        case "rowwise":
            return layers.LinearAllreduce(module, group, name=name)
        case "rowwise_split_input":
            return layers.LinearAllreduceWithReplicatedInput(module, group, name=name)
    raise AssertionError(f"no decoder has a layer with style {style}")


def _summed_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def summed(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    return summed
