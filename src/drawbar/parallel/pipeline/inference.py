"""``PipelineInference``: a pipeline that is called like the full model, for evaluation, prediction and transformers'
``generate``. Every rank calls it with the same arguments. The stages run in turn, and all ranks receive the logits, so
all ranks generate the same text.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from drawbar.errors import UserError

Arguments = dict[str, Any]
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


class PipelineInference:
    """The stages of this rank as ``model``: a shallow copy of the first, whose forward runs the whole pipeline.

    Create it before FSDP and the packed-row hooks are applied to the stages: hooks must run inside the stage calls.

    Args:
        stage_modules, group: as for ``Pipeline``.
        width: hidden size.
        vocabulary: number of logits per position.
    """

    def __init__(
        self,
        stage_modules: Sequence[nn.Module],
        group: dist.ProcessGroup,
        device: torch.device,
        width: int,
        vocabulary: int,
    ) -> None:
        self.stage_modules = stage_modules
        self.group = group
        self.device = device
        self.width = width
        self.vocabulary = vocabulary
        self.last = group.rank() == group.size() - 1
        """Whether this rank has the last stage."""
        self._answer: Callable[[Arguments], Any] = self.compute
        self.model = self._make_model()

    def _make_model(self) -> Any:
        # without hooks: the hooks of the stages run when the stages are called
        model: Any = copy(self.stage_modules[0])
        for name in _HOOKS:
            setattr(model, name, OrderedDict())
        forward = model.forward
        names = list(inspect.signature(forward).parameters)

        @wraps(forward)
        def forward_through_stages(*args: Any, **kwargs: Any) -> Any:
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
            kwargs.pop("return_dict", None)
            _check(kwargs)
            return self._answer(kwargs)

        model.forward = forward_through_stages
        if len(self.stage_modules) > 1:  # a transformers cache covers the layers of only one stage
            model.generate = _without_cache(model.generate)
        return model

    def compute(self, kwargs: Arguments) -> CausalLMOutputWithPast:
        """Run a forward pass of the full model, stage by stage; every rank gets the same outputs, in fp32."""
        rows, length = kwargs["input_ids"].shape
        if len(self.stage_modules) > 1:
            kwargs = {**kwargs, "past_key_values": None, "use_cache": False}
        logits = self._in_turns(kwargs, rows, length)
        if logits is None:
            shape = (rows, _num_logits(kwargs.get("logits_to_keep", 0), length), self.vocabulary)
            logits = torch.empty(shape, device=self.device)
        dist.broadcast(logits, group_src=self.group.size() - 1, group=self.group)
        return CausalLMOutputWithPast(logits=logits, past_key_values=kwargs.get("past_key_values"))

    @torch.no_grad()
    def last_stage_output(self, kwargs: Arguments) -> Tensor | None:
        """The output of the last stage, only on its rank: the logits, or the loss if its head computes it."""
        return self._in_turns(kwargs, *kwargs["input_ids"].shape)

    def _in_turns(self, kwargs: Arguments, rows: int, length: int) -> Tensor | None:
        rank, ranks = self.group.rank(), self.group.size()
        for_all_positions = {name: value for name, value in kwargs.items() if name != "logits_to_keep"}
        stages = ranks * len(self.stage_modules)
        out: Tensor | None = None
        for chunk, module in enumerate(self.stage_modules):
            stage = rank + chunk * ranks
            received: tuple[Tensor, ...] = ()
            if stage > 0:
                hidden_BLH = torch.empty((rows, length, self.width), device=self.device)
                dist.recv(hidden_BLH, group=self.group, group_src=(rank - 1) % ranks)
                received = (hidden_BLH,)
            out = module(*received, **(kwargs if stage == stages - 1 else for_all_positions)).float().contiguous()
            if stage < stages - 1:
                dist.send(out, group=self.group, group_dst=(rank + 1) % ranks)
        return out if self.last else None

    def record_inputs(self, call: Callable[[nn.Module], Any]) -> Arguments:
        """Record the arguments with which ``call`` calls the model, without computing anything.

        Raises:
            UserError: it does not call the model.
        """

        def record(kwargs: Arguments) -> Any:
            raise _ModelCalled(kwargs)

        with self._model_returns(record):
            try:
                call(self.model)
            except _ModelCalled as called:
                return called.kwargs
        raise _fault("does not call the model")

    def replay_outputs(self, call: Callable[[nn.Module], Any], logits: Tensor) -> Any:
        """The result of ``call`` if its single call of the model returns these logits.

        Raises:
            UserError: it calls the model again.
        """
        given = [CausalLMOutputWithPast(logits=logits)]

        def replay(kwargs: Arguments) -> CausalLMOutputWithPast:
            if not given:
                raise _fault("calls the model more than once")
            return given.pop()

        with self._model_returns(replay):
            return call(self.model)

    @contextmanager
    def _model_returns(self, answer: Callable[[Arguments], Any]) -> Iterator[None]:
        self._answer = answer
        try:
            yield
        finally:
            self._answer = self.compute

    @contextmanager
    def synced_rng(self) -> Iterator[None]:
        """Context manager in which all ranks of the pipeline use the RNG state of its first rank, so that they sample
        the same text."""
        on_cuda = self.device.type == "cuda"
        state = torch.cuda.get_rng_state(self.device) if on_cuda else torch.get_rng_state()
        sent = state.to(self.device)
        dist.broadcast(sent, group_src=0, group=self.group)
        if self.group.rank() == 0:
            yield
            return
        with torch.random.fork_rng(devices=[self.device] if on_cuda else []):
            if on_cuda:
                torch.cuda.set_rng_state(sent.cpu(), self.device)
            else:
                torch.set_rng_state(sent)
            yield


class _ModelCalled(BaseException):
    """Ends a recorded call; a BaseException, so that no ``except Exception`` in a task catches it."""

    def __init__(self, kwargs: Arguments) -> None:
        super().__init__()
        self.kwargs = kwargs


def _num_logits(logits_to_keep: int | Tensor, length: int) -> int:
    """Number of positions with logits: transformers' ``slice_logits_to_keep``."""
    if isinstance(logits_to_keep, Tensor):
        return len(logits_to_keep)
    return min(logits_to_keep or length, length)


def _without_cache(generate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(generate)
    def generate_without_cache(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{**kwargs, "use_cache": False})

    return generate_without_cache


def _check(kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("input_ids") is None:
        raise _fault("calls the model without input_ids")
    if kwargs.get("labels") is not None:
        raise _fault("passes labels to the model, for a loss that only the last stage could compute")


def _fault(what: str) -> UserError:
    return UserError(
        f"the task's forward {what}",
        where="parallel.pipeline",
        remedy="let forward call model(**inputs) once, and compute the loss in the task's loss; or set "
        "parallel.pipeline=1",
    )
