"""Language models whose head computes the loss itself, without logits of all positions.

The loss is computed in the call of the head's own module, where the hooks of FSDP and ZeRO-3 have its weight at hand.
The model is called as usual, with its targets beside the inputs, and its outputs contain the summed ``loss``.

What a model applies to its logits after the head, such as a soft cap (Gemma 2), a factor (Cohere, Granite) or a bias
(BART), is recorded from the model's own code and applied in the head, too.

B: rows, L: tokens in a row, H: hidden size, V: vocabulary, N: targets; C: any rows of logits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.func import functional_call
from transformers import PreTrainedModel

from drawbar.errors import UserError
from drawbar.models.segments import UniqueRows
from drawbar.parallel.chunked_loss import PLAIN, LossTargets, LossTerms, Transform, VocabularyShard
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
        """The ops as one function of any rows of logits; None if there are none.

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


POSITIONS, LABELS = "target_positions", "target_labels"
"""The keyword arguments by which a model with a ``LossHead`` is given its ``LossTargets``."""

CrossEntropy = Callable[..., Tensor]
"""``chunked_cross_entropy``, or a function that takes the same arguments."""


class LossHead(nn.Linear):
    """A head that gives the loss in place of logits, wherever it has targets; without them, a linear layer."""

    cross_entropy: CrossEntropy
    transform: Transform | None
    targets: LossTargets | None
    loss: Tensor | None

    @wraps(nn.Linear.forward)  # ``drawbar.parallel.precision`` unwraps it and finds nn.Linear's
    def forward(self, input: Tensor) -> Tensor:
        if self.targets is None:
            return super().forward(input)
        hidden_BLH, weight_VH, bias_V, shard = input, self.weight, self.bias, None
        if isinstance(input, DTensor):  # each tensor-parallel rank has a shard of the vocabulary
            mesh = input.device_mesh
            _, start = Shard.local_shard_size_and_offset(self.out_features, mesh.size(), mesh.get_local_rank())
            shard = VocabularyShard(mesh.get_group(), start, self.out_features)
            hidden_BLH = input.to_local(grad_placements=[Partial()])
            weight_VH, bias_V = (_local(tensor) for tensor in (self.weight, self.bias))
        if hidden_BLH.shape[:-1] != self.targets.labels_BL.shape:
            raise ValueError(
                f"the head has {[*hidden_BLH.shape[:-1]]} positions, the labels are {[*self.targets.labels_BL.shape]}"
            )
        hidden_NH = UniqueRows.apply(hidden_BLH.flatten(0, -2), self.targets.positions_N)
        loss = self.cross_entropy(hidden_NH, weight_VH, bias_V, self.targets.labels_N, self.transform, shard)
        no_logits: Tensor
        self.loss, no_logits = _WithNoLogits.apply(loss, (0, *hidden_BLH.shape[1:-1], self.out_features))
        return no_logits


def _local(tensor: Any) -> Any:
    return tensor if tensor is None else tensor.to_local(grad_placements=[Shard(0)])


class _WithNoLogits(torch.autograd.Function):
    """The loss, and empty logits (0, L, V) to go through what the model does after its head. As one autograd node gives
    both, its backward waits for both gradients: FSDP's hooks on the outputs of head and model have run by then."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return loss.clone(), loss.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return outer[0], None


def give_loss_head(module: nn.Module, cross_entropy: CrossEntropy, ops: LogitOps) -> None:
    """Let a model, or a pipeline stage of one, compute its loss in the head, in place.

    Called with ``target_positions`` and ``target_labels``, the model returns outputs with the sum of the ``loss`` and
    with no logits. A last stage returns the loss; other stages drop both arguments. Called without, nothing changes.

    Args:
        ops: the operators that the full model applies to its logits after the head.
    """
    head = module.get_output_embeddings()
    if type(head) is nn.Linear:  # of the stages, only the last has a head
        head.__class__ = LossHead
        head.cross_entropy, head.transform = cross_entropy, ops.of(module)
        head.targets = head.loss = None
    module.register_forward_pre_hook(_take_targets, with_kwargs=True)
    module.register_forward_hook(_return_loss, always_call=True)


def _head_of(module: Any) -> LossHead | None:
    """Looked up in each call: the module may be a copy of the one that got the head."""
    head = module.get_output_embeddings()
    return head if isinstance(head, LossHead) else None


def _take_targets(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    inputs = {name: value for name, value in kwargs.items() if name not in (POSITIONS, LABELS)}
    head = _head_of(module)
    if head is not None and POSITIONS in kwargs:
        head.targets = LossTargets(kwargs[POSITIONS], kwargs[LABELS])
    return args, inputs


def _return_loss(module: nn.Module, args: Any, outputs: Any) -> Any:
    head = _head_of(module)
    if head is None or head.targets is None:
        return outputs
    loss, head.targets, head.loss = head.loss, None, None
    if outputs is None:
        return None  # the forward pass has failed
    assert loss is not None, "the model did not call its head, as it did when its logit ops were recorded"
    if isinstance(outputs, Tensor):
        return loss + outputs.sum()
    outputs["loss"] = loss + outputs.logits.sum()
    return outputs


def liger_cross_entropy(ops: LogitOps, terms: LossTerms = PLAIN) -> CrossEntropy:
    """A function to use in place of ``chunked_cross_entropy``, computed by liger-kernel.

    Raises:
        UserError: liger-kernel is not installed, or cannot compute this model's loss.
    """
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise UserError(
            f"liger-kernel cannot be used: {error}",
            where="task.cross_entropy",
            remedy="install it (pip install 'drawbar[liger]'), or set task.cross_entropy=auto",
        ) from error
    if ops.ops:
        raise UserError(
            "liger-kernel cannot compute this loss: the model changes its logits after the head",
            where="task.cross_entropy",
            remedy="set task.cross_entropy=auto",
        )

    def cross_entropy(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_N: Tensor, *_: Any) -> Tensor:
        smoothing, z_loss = terms.in_training()
        loss: Tensor = liger_fused_linear_cross_entropy(
            hidden_NH,
            weight_VH,
            labels_N,
            bias_V,
            reduction="sum",
            accum_dtype=torch.float32,
            label_smoothing=smoothing,
            lse_square_scale=z_loss,
        )
        return loss.float()

    return cross_entropy
