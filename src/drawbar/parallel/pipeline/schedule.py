"""Training steps of a pipeline, by the schedules of ``torch.distributed.pipelining``.

T: tokens in the largest micro-batch of a step, rounded up; H: hidden size. torch's stages send tensors of one fixed
shape, but micro-batches differ in shape. So hidden states are sent as (T, H), padded with zeros, and each stage
computes on unpadded micro-batches. They are sent in fp32, the dtype of the residual stream under autocast: so a
pipeline computes the same as one process.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward
from torch.nn import functional

from drawbar.parallel.precision import autocast

Inputs = Mapping[str, Any]
"""What the model is called with for one micro-batch: ``input_ids`` (B, L), and more."""
Loss = Callable[[Tensor, int], Tensor]
"""(output of the last stage: the logits, or the loss of its head; index of the micro-batch) → what backward starts
from (0-d)."""


class _Stage(PipelineStage):
    """torch's stage, but keyword arguments come from ``inputs``, and hidden states may have any shape."""

    inputs: Sequence[Inputs] = ()
    precision = "fp32"
    tokens = 0
    reshard = False
    """FSDP: reduce the gradients and free the parameters of each block within each backward, not once a step."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._free(*self.args_recv_info.values())

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._free(*self.grad_recv_info.values())

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._free(self.args_recv_info[bwd_chunk_id], self.grad_recv_info[bwd_chunk_id])

    def _allocate(self, received: Iterable[Any]) -> None:
        """Make the receive buffers of one micro-batch: torch would make those of all micro-batches at once."""
        for info in received:
            if getattr(info, "buffer", None) is not None:  # the first stage receives nothing
                info.buffer = torch.empty_like(info.buffer, device=self.device)

    @staticmethod
    def _free(*received: Iterable[Any]) -> None:
        for info in chain.from_iterable(received):
            if getattr(info, "buffer", None) is not None:
                info.buffer = torch.empty_like(info.buffer, device="meta")

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        return super().forward_one_chunk(fwd_chunk_id, args, dict(self.inputs[fwd_chunk_id]), save_forward_output)

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Tensor:
        rows, length = kwargs["input_ids"].shape
        taken = [hidden_TH[: rows * length].unflatten(0, (rows, length)) for hidden_TH in args]
        with autocast(self.precision, self.device):
            out: Tensor = super().forward_maybe_with_nosync(*taken, **kwargs)
        if self.is_last:
            return out
        return functional.pad(out.flatten(0, 1).float(), (0, 0, 0, self.tokens - rows * length))

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        if not (self.reshard and isinstance(self.submod, FSDPModule)):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "these schedules do not take a backward apart"
        self.submod.set_is_last_backward(last_backward)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        self.submod.set_requires_all_reduce(last_backward)
        names = ("stage_output", "output_grads", "input_values")
        return stage_backward(*(bwd_kwargs[name] for name in names)), None


class Pipeline:
    """The stages of this rank, and their part in each step.

    Args:
        stage_modules: in order: stage ``i``, and with interleaving ``i + P`` as well, on rank ``i`` of P.
        schedule: ``gpipe``, ``1f1b`` or ``interleaved``.
        group: the ranks that hold the model's stages, in their order.
        width: H.
        reshard: see ``_Stage``.
    """

    def __init__(
        self,
        stage_modules: Sequence[nn.Module],
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
        width: int,
        precision: str,
        reshard: bool,
    ) -> None:
        self.stage_modules = stage_modules
        self.name = schedule
        self.group = group
        self.device = device
        self.width = width
        self.precision = precision
        self.reshard = reshard
        self._key: tuple[int, int] | None = None
        self._stages: list[_Stage] = []
        self._schedule: Any = None
        self._loss: Loss | None = None

    def round_up_micro_batches(self, count: int) -> int:
        """The smallest number of micro-batches, at least ``count``, that the schedule accepts."""
        ranks = self.group.size()
        while self.name == "interleaved" and count % max(1, count // ranks) != 0:  # what torch refuses
            count += 1
        return count

    def run(self, inputs: Sequence[Inputs], loss: Loss) -> None:
        """Forward and backward of all micro-batches; gradients add up in the parameters.

        Every rank calls it with the same micro-batches.

        Args:
            inputs: of each micro-batch, as many as ``round_up_micro_batches`` says.
            loss: called on the last stage alone.
        """
        self._prepare(len(inputs), _rounded_up(max(each["input_ids"].numel() for each in inputs)))
        for stage in self._stages:
            stage.inputs = inputs
        self._loss = loss
        self._schedule.step(target=torch.arange(len(inputs)), return_outputs=False)
        self._loss = None
        for stage in self._stages:
            stage.inputs = ()

    def _prepare(self, count: int, tokens: int) -> None:
        """Make the schedule for ``count`` micro-batches of this size. Only the newest is kept: sizes are rounded up, so
        most steps use the same one again."""
        if self._key == (count, tokens):
            return
        self._schedule, self._stages = None, []
        ranks, rank = self.group.size(), self.group.rank()
        self._stages = [
            self._stage(module, rank + ranks * chunk, ranks * len(self.stage_modules), tokens)
            for chunk, module in enumerate(self.stage_modules)
        ]
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": self._compute_loss, "scale_grads": False}
        if self.name == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(list(self._stages), **options)
        elif self.name == "gpipe" or count < ranks:  # torch's 1F1B refuses so few micro-batches
            self._schedule = ScheduleGPipe(self._stages[0], **options)
        else:
            self._schedule = Schedule1F1B(self._stages[0], **options)
        self._key = (count, tokens)

    def _stage(self, part: nn.Module, index: int, stages: int, tokens: int) -> _Stage:
        hidden_TH = torch.empty((tokens, self.width), device="meta", requires_grad=True)
        stage = _Stage(
            part,
            index,
            stages,
            self.device,
            input_args=(hidden_TH,) if index > 0 else (),
            output_args=(hidden_TH,),  # wrong for the last stage, where it is not used
            group=self.group,
        )
        stage.precision = self.precision
        stage.reshard = self.reshard
        stage.tokens = tokens
        return stage

    def _compute_loss(self, logits: Tensor, number: Tensor) -> Tensor:
        assert self._loss is not None
        with autocast(self.precision, self.device):
            return self._loss(logits, int(number))


def _rounded_up(tokens: int) -> int:
    """To one of four sizes between two powers of two: then few steps need a new schedule."""
    unit = 2 ** max(0, tokens.bit_length() - 3)
    return -(-tokens // unit) * unit


@torch.no_grad()
def add_up_tied(gradient: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Add the gradient of the other copy of a tied weight, in place. Both ranks then have the same sum, bit by bit.

    Args:
        gradient: the gradient of this rank's copy, as a plain tensor.
        peer: the rank, in the group, that has the other copy.
    """
    other = torch.empty_like(gradient)
    operations = [
        dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gradient += other
