"""Training steps of a pipeline: the order in which a rank computes, and what it sends to its neighbours.

The schedules are GPipe (Huang et al. 2019, arXiv:1811.06965), 1F1B and interleaved 1F1B (Narayanan et al. 2021,
arXiv:2104.04473). A step is a list of instructions, known in advance. Hidden states are sent in the dtype of the
residual stream, so a pipeline computes the same as one process.

This does not use ``torch.distributed.pipelining``: its stages require micro-batches of one shape, and the internals to
replace for varying shapes differ between torch 2.11, 2.13 and 2.15.

P: ranks of the pipeline; B: rows, L: tokens in a row, of a micro-batch; H: hidden size.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from drawbar.parallel.ddp import gradient_sync
from drawbar.parallel.precision import autocast, stream_dtype

Inputs = Mapping[str, Any]
"""The model's keyword arguments for one micro-batch: ``input_ids`` (B, L), and others."""
Loss = Callable[[Tensor, int], Tensor]
"""(output of the last stage: the logits, or the loss of its head; index of the micro-batch) → the scalar that backward
starts from (0-d)."""


@dataclass(frozen=True)
class Action:
    """Forward or backward of one micro-batch through one stage. Stage ``s`` is on rank ``s % P``."""

    stage: int
    micro_batch: int
    is_backward: bool

    def needs(self, stages: int) -> "Action | None":
        """The action of another stage whose result this one needs; None if it starts from the micro-batch or the
        loss."""
        before = self.stage + 1 if self.is_backward else self.stage - 1
        return Action(before, self.micro_batch, self.is_backward) if 0 <= before < stages else None

    def feeds(self, stages: int) -> "Action | None":
        """The action of another stage that needs this one's result."""
        after = self.stage - 1 if self.is_backward else self.stage + 1
        return Action(after, self.micro_batch, self.is_backward) if 0 <= after < stages else None


@dataclass(frozen=True)
class Receive:
    """Receive the result of another rank's action. Messages between two ranks arrive in the sender's order."""

    result_of: Action


@dataclass(frozen=True)
class Send:
    """Send the result of an action to the rank whose action needs it."""

    result_of: Action


Instruction = Action | Receive | Send


def actions_of(schedule: str, rank: int, ranks: int, chunks: int, count: int) -> list[Action]:
    """The actions of a rank in a step of ``count`` micro-batches, in order.

    Some forwards come first, then forwards and backwards alternate, then the remaining backwards follow. With several
    stages on a rank, rounds of P micro-batches pass through one of its stages after another; the last round may be
    incomplete.

    Args:
        schedule: ``gpipe``, ``1f1b`` or ``interleaved``.
        chunks: stages on each rank.
    """
    rounds = [range(first, first + ranks) for first in range(0, count, ranks)]
    order = [(chunk, number) for numbers in rounds for chunk in range(chunks) for number in numbers]
    forwards = [Action(rank + ranks * chunk, number, False) for chunk, number in order]
    backwards = [Action(rank + ranks * (chunks - 1 - chunk), number, True) for chunk, number in order]
    behind = ranks - 1 - rank  # number of ranks that the first micro-batch has yet to pass
    lead = {"gpipe": len(order), "1f1b": behind, "interleaved": (chunks - 1) * ranks + 2 * behind}[schedule]
    in_turn = chain.from_iterable(zip_longest(forwards[lead:], backwards))
    return [action for action in (*forwards[:lead], *in_turn) if action is not None and action.micro_batch < count]


@lru_cache(maxsize=16)  # most steps have as many micro-batches as the previous one
def instructions_of(schedule: str, rank: int, ranks: int, chunks: int, count: int) -> tuple[Instruction, ...]:
    """A rank's step: its actions, each preceded by what it must receive, and followed by what it must send."""
    stages = ranks * chunks
    arrivals = {}
    for peer in {(rank - 1) % ranks, (rank + 1) % ranks}:
        fed = [(action, action.feeds(stages)) for action in actions_of(schedule, peer, ranks, chunks, count)]
        arrivals[peer] = iter([action for action, taker in fed if taker is not None and taker.stage % ranks == rank])
    received: set[Action] = set()
    instructions: list[Instruction] = []
    for action in actions_of(schedule, rank, ranks, chunks, count):
        needed = action.needs(stages)
        while needed is not None and needed not in received:
            arrival = next(arrivals[needed.stage % ranks])
            received.add(arrival)
            instructions.append(Receive(arrival))
        instructions.append(action)
        if action.feeds(stages) is not None:
            instructions.append(Send(action))
    return tuple(instructions)


@dataclass
class _Step:
    """A rank's state within a step."""

    inputs: Sequence[Inputs]
    loss: Loss
    messages: dict[Action, Tensor] = field(default_factory=dict)
    """Results of actions, to be sent or received: hidden states and their gradients, shape (B, L, H)."""
    graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """By stage and micro-batch, from forward to backward: the stage's input and output."""
    sent: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    """Messages in flight, whose memory must be kept."""


class Pipeline:
    """The stages of this rank, and their part in each step.

    Args:
        stage_modules: in order: stage ``i``, and with interleaving also ``i + P``, on rank ``i`` of P.
        schedule: ``gpipe``, ``1f1b`` or ``interleaved``.
        group: the ranks that hold the model's stages, in stage order; for messages to higher ranks.
        downward: the same ranks in another group, for messages to lower ranks: NCCL keeps the order of all messages in
            a group, so two ranks that send to each other at the same time would deadlock.
        width: H.
        reshard: FSDP: reduce the gradients and free the parameters of each block within each backward, not once a step.
    """

    def __init__(
        self,
        stage_modules: Sequence[nn.Module],
        schedule: str,
        group: dist.ProcessGroup,
        downward: dist.ProcessGroup,
        device: torch.device,
        width: int,
        precision: str,
        reshard: bool,
    ) -> None:
        self.stage_modules = stage_modules
        self.schedule = schedule
        self.group = group
        self.downward = downward
        self.device = device
        self.width = width
        self.precision = precision
        self.reshard = reshard
        self.rank, self.ranks = group.rank(), group.size()
        self.stages = self.ranks * len(stage_modules)

    def run(self, inputs: Sequence[Inputs], loss: Loss) -> None:
        """Run forward and backward of all micro-batches; gradients accumulate in the parameters.

        Every rank must call it with the same micro-batches.

        Args:
            loss: called only on the last stage.
        """
        step = _Step(inputs, loss)
        chunks = len(self.stage_modules)
        for instruction in instructions_of(self.schedule, self.rank, self.ranks, chunks, len(inputs)):
            match instruction:
                case Receive(action):
                    step.messages[action] = self._receive(step, action)
                case Send(action):
                    self._send(step, action)
                case Action(is_backward=False):
                    self._forward(step, instruction)
                case Action():
                    self._backward(step, instruction)
        for work, _ in step.sent:
            work.wait()

    def _forward(self, step: _Step, action: Action) -> None:
        module, inputs = self.stage_modules[action.stage // self.ranks], step.inputs[action.micro_batch]
        needed = action.needs(self.stages)
        hidden_BLH = None if needed is None else step.messages.pop(needed).requires_grad_()
        with autocast(self.precision, self.device):
            out = module(**inputs) if hidden_BLH is None else module(hidden_BLH, **inputs)
            if action.feeds(self.stages) is None:
                out = step.loss(out, action.micro_batch)
        if action.feeds(self.stages) is not None:
            out = out.to(stream_dtype(self.precision)).contiguous()
            step.messages[action] = out.detach()
        step.graphs[action.stage, action.micro_batch] = hidden_BLH, out

    def _backward(self, step: _Step, action: Action) -> None:
        module, is_last = self.stage_modules[action.stage // self.ranks], action.micro_batch == len(step.inputs) - 1
        hidden_BLH, out = step.graphs.pop((action.stage, action.micro_batch))
        needed = action.needs(self.stages)
        gradient_BLH = None if needed is None else step.messages.pop(needed)
        if isinstance(module, FSDPModule):
            module.set_is_last_backward(is_last)
        with gradient_sync(module, is_last, gathers_once=not self.reshard):
            out.backward(gradient_BLH)
        if hidden_BLH is not None:
            assert hidden_BLH.grad is not None, "every output of a stage depends on what it received"
            step.messages[action] = hidden_BLH.grad.contiguous()

    def _receive(self, step: _Step, action: Action) -> Tensor:
        shape, dtype = (*step.inputs[action.micro_batch]["input_ids"].shape, self.width), stream_dtype(self.precision)
        message_BLH = torch.empty(shape, dtype=dtype, device=self.device)
        source = action.stage % self.ranks
        dist.recv(message_BLH, group=self._group(source, self.rank), group_src=source)
        return message_BLH

    def _send(self, step: _Step, action: Action) -> None:
        while step.sent and step.sent[0][0].is_completed():
            step.sent.popleft()
        message_BLH, taker = step.messages.pop(action), action.feeds(self.stages)
        assert taker is not None, "the result of an action that feeds none is not sent"
        destination = taker.stage % self.ranks
        work = dist.isend(message_BLH, group=self._group(self.rank, destination), group_dst=destination)
        assert work is not None, "this rank is in the group"
        step.sent.append((work, message_BLH))

    def _group(self, source: int, destination: int) -> dist.ProcessGroup:
        return self.group if source < destination else self.downward


@torch.no_grad()
def add_up_tied(gradient: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Add the gradient of the other copy of a tied weight, in place. Both ranks then have bitwise the same sum.

    Args:
        gradient: the gradient of this rank's copy, as a plain tensor.
        peer: the group rank that has the other copy.
    """
    other = torch.empty_like(gradient)
    operations = [
        dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gradient += other
