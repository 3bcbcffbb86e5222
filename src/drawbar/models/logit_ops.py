"""The operators that a model applies to its logits after the head: a soft cap (Gemma 2), a factor (Cohere, Granite) or
a bias (BART). They are recorded from the model's own code, so that a loss computed in the head applies them, too.

B: rows, L: tokens in a row, H: hidden size, V: vocabulary; C: any rows of logits.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from drawbar.parallel.chunked_loss import Transform
from drawbar.runtime.torch_internals import TorchDispatchMode


class UnknownHead(Exception):
    """The model's operations on its head's logits cannot be determined."""


Operator = tuple[Any, Sequence[Any]]
"""An operator and its arguments: numbers, ``...`` for the logits, or the name of one of the model's buffers."""


@dataclass(frozen=True)
class LogitOps:
    """The elementwise operators that a model applies to its logits after the head, in order."""

    ops: Sequence[Operator]

    @property
    def has_buffers(self) -> bool:
        """Whether it takes buffers of the model, such as a bias for each token of the vocabulary."""
        return any(isinstance(one, str) for _, arguments in self.ops for one in arguments)

    def of(self, model: nn.Module) -> Transform | None:
        """The ops as one function of any rows of logits; None where there are none.

        Args:
            model: the model whose buffers are read, each time that the function is called.
        """

        def transform(logits_CV: Tensor) -> Tensor:
            for operator, arguments in self.ops:
                values = (model.get_buffer(one) if isinstance(one, str) else one for one in arguments)
                logits_CV = operator(*(logits_CV if value is ... else value for value in values))
            return logits_CV

        return transform if self.ops else None


def ops_after_head(model: nn.Module) -> LogitOps:
    """Record the operators that a model applies to its logits, by running its code on the meta device, without its
    body.

    Raises:
        UnknownHead: it has no plain linear head, or does to the logits what is not elementwise.
    """
    head: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if type(head) is not nn.Linear:
        raise UnknownHead(f"a {type(model).__name__} has no linear layer as its head")
    sizes = [head.in_features, getattr(model.config.get_text_config(), "hidden_size", None)]
    for width in dict.fromkeys(sizes):
        with suppress(Exception):  # whatever keeps a model from running here, its head is then not known
            in_training, in_evaluation = (_record(model, head, width, training) for training in (True, False))
            if in_training == in_evaluation:
                return LogitOps(in_training)
    raise UnknownHead(f"what a {type(model).__name__} does to its logits is not known")


_ROW = 2
"""Tokens of the row that a model is tried on."""


def _record(model: Any, head: nn.Linear, width: int, training: bool) -> list[Operator]:
    """The operators on the logits, where hidden states have this width."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # all in fp32: frozen weights may be stored low, and without autocast torch multiplies no two dtypes
    state = {
        name: torch.empty_like(tensor, dtype=torch.float32 if tensor.is_floating_point() else None, device="meta")
        for name, tensor in tensors.items()
    }
    recorder = _LogitRecorder({id(state[name]): name for name, _ in model.named_buffers()})
    hidden_BLH = torch.empty(1, _ROW, width, device="meta")
    inputs = {"input_ids": torch.zeros(1, _ROW, dtype=torch.long, device="meta")}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        _in_mode(model, training),
        _without_body(model, hidden_BLH),
        head.register_forward_hook(recorder.begin),
        recorder,
    ):
        logits = functional_call(model, state, (), inputs).logits
    if recorder.logits is None or logits is not recorder.logits:
        raise UnknownHead
    return recorder.ops


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def _without_body(model: Any, hidden_BLH: Tensor) -> Iterator[None]:
    """If the model has a base model, let that return these hidden states."""
    body = model.base_model
    if body is model:
        yield
        return
    kept = vars(body).get("forward")
    body.forward = lambda *args, **kwargs: _BodyOutputs(hidden_BLH)
    try:
        yield
    finally:
        del body.forward
        if kept is not None:
            body.forward = kept


class _BodyOutputs:
    """Stands for what a base model returns: hidden states, and nothing else."""

    def __init__(self, hidden_BLH: Tensor) -> None:
        self.last_hidden_state = hidden_BLH

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _LogitRecorder(TorchDispatchMode):
    """Follows the logits from operator to operator, as long as these are elementwise.

    Args:
        buffers: names of the model's buffers, by the buffers' ``id``.
    """

    def __init__(self, buffers: Mapping[int, str]) -> None:
        super().__init__()
        self.buffers = buffers
        self.logits: Tensor | None = None
        self.ops: list[Operator] = []

    def begin(self, head: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> None:
        """The head's forward hook."""
        if self.logits is not None or args[0].shape[:-1] != (1, _ROW):
            raise UnknownHead("it is not called once, for all positions")
        self.logits = logits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.logits is None or not any(one is self.logits for one in args):
            return result
        arguments = [self._argument(one) for one in args]
        # views are refused as well: they might be written to
        if torch.Tag.pointwise not in func.tags or func._schema.is_mutable or kwargs or None in arguments:
            raise UnknownHead(f"{func} is not elementwise")
        self.ops.append((func, arguments))
        self.logits = result
        return result

    def _argument(self, value: Any) -> Any:
        """The argument in the form of ``Operator``; None for one of another kind."""
        if value is self.logits:
            return ...
        return value if isinstance(value, int | float) else self.buffers.get(id(value))
