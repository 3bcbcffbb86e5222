"""Records what a step on fake tensors takes: when each storage is allocated and freed, operations, and bytes sent."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from drawbar.runtime.torch_internals import FakeTensor, TorchDispatchMode, _resolve_process_group, tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
LOGITS, COMMUNICATION, ACTIVATIONS = "logits", "communication", "activations"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, LOGITS, COMMUNICATION, ACTIVATIONS)
"""What memory is for. ``communication``: what FSDP gathers, and other buffers of collectives. ``activations``:
everything else, including the batch and the model's buffers."""
OFFLOADED = (PARAMETERS, GRADIENTS, OPTIMIZER)
"""Kinds that FSDP keeps in host memory with ``parallel.offload``: a rank's own parts."""

_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


@dataclass(frozen=True)
class Peak:
    """The moment at which a rank's tensors took most."""

    bytes: int
    by_kind: dict[str, int]


class StepRecorder(TorchDispatchMode):
    """Dispatch mode that follows every storage that is made in its context; it is entered inside ``fake_tensors``.
    Where a program asks for the value of a tensor (``bool(tensor)``, ``tensor.item()``), it gives True or 1, as if all
    values were finite and no mask hid anything.

    Args:
        axes_of: from global ranks to the names of the mesh axes along which they differ, joined by ``+``.
        devices_are_cpus: whether the ranks' devices are CPUs. There gloo gathers and scatters by way of a copy, and an
            operator on two dtypes first copies the operand of the smaller one.
    """

    def __init__(self, axes_of: Callable[[list[int]], str], devices_are_cpus: bool) -> None:
        super().__init__()
        self.flops = 0
        self.traffic: Counter[str] = Counter()
        """Bytes that this rank sends in ring algorithms, by axes of the mesh (``dp_shard``, ``dp_replicate+cp``)."""
        self.logits_widths: set[int] = set()
        """Sizes of the vocabulary: a tensor whose last dim has such a size counts as logits."""
        self._axes_of = axes_of
        self._devices_are_cpus = devices_are_cpus
        self._numbers = WeakIdKeyDictionary()  # storage → its number
        self._sizes: list[int] = []  # bytes now, by number
        self._kinds: dict[int, str] = {}
        self._events: list[tuple[int, int]] = []  # (number, change of its bytes)
        self._begin = 0

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        recorder = self

        def resize_(storage: torch.UntypedStorage, size: int) -> None:  # FSDP's way to free and to gather
            recorder._resize(storage, size)
            if storage in recorder._numbers:
                recorder._change(recorder._numbers[storage], size)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one not in _PLAIN for one in types):
            return NotImplemented  # a DTensor comes back as the tensors of this rank
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.equal.default:
            return True
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._follow(tensor)
        if func.namespace in ("c10d", "_c10d_functional", "fsdp"):
            self._note_communication(func, args, kwargs, made)
        elif self._devices_are_cpus and torch.Tag.pointwise in func.tags:
            self._note_casts(args)
        return out

    def follow(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of tensors; those that were made outside this context count from now on."""
        for tensor in tensors:
            number = self._follow(local(tensor))
            if number is not None:
                self._kinds[number] = kind

    def begin(self) -> None:
        """Start measuring the peak."""
        self._begin = len(self._events)

    def peak(self, offloaded: Collection[str] = ()) -> Peak:
        """The peak since ``begin``. A storage counts under the kind that it has now, also for the time before it got
        that.

        Args:
            offloaded: kinds that take no memory of the device.
        """
        now: Counter[str] = Counter()
        total, best = 0, Peak(0, {})
        for index, (number, change) in enumerate(self._events):
            kind = self._kinds.get(number, ACTIVATIONS)
            if kind not in offloaded:
                now[kind] += change
                total += change
            if index >= self._begin - 1 and total > best.bytes:
                best = Peak(total, dict(now))
        return Peak(best.bytes, {kind: best.by_kind.get(kind, 0) for kind in KINDS})

    def _follow(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, which is followed from now on; None for a tensor that takes no memory."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return None
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            return self._numbers[storage]
        number = len(self._sizes)
        self._numbers[storage] = number
        self._sizes.append(0)
        self._change(number, storage.nbytes())
        if tensor.ndim > 1 and tensor.shape[-1] in self.logits_widths:
            self._kinds[number] = LOGITS
        weak = torch.utils.weak.weakref
        weak.finalize(storage, self._change, number, 0).atexit = False
        return number

    def _change(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self._events.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def _copy(self, size: int, kind: str) -> None:
        """Note a copy that a library makes and frees inside one operation."""
        number = len(self._sizes)
        self._sizes.append(0)
        self._kinds[number] = kind
        self._change(number, size)
        self._change(number, 0)

    def _note_casts(self, args: Any) -> None:
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.ndim]
        floats = [one for one in given if one.dtype.is_floating_point]
        if len({one.dtype for one in floats}) > 1:
            common = max(one.element_size() for one in floats)
            self._copy(sum(one.numel() * common for one in floats if one.element_size() < common), ACTIVATIONS)

    def _note_communication(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in (*given, *made):
            number = self._follow(tensor)
            if number is not None:
                self._kinds.setdefault(number, COMMUNICATION)
        group = _group_of(args, kwargs)
        if group is not None and group.size() > 1:
            name = func._schema.name.split("::")[1]
            sent = _sent(name, args, made, group.size())
            if self._devices_are_cpus and ("gather" in name or "scatter" in name):
                self._copy(sent * group.size() // (group.size() - 1), COMMUNICATION)
            self.traffic[self._axes_of(dist.get_process_group_ranks(group))] += sent


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts of tensors."""
    return sum(part.numel() * part.element_size() for part in map(local, tensors))


def _group_of(args: Any, kwargs: Any) -> dist.ProcessGroup | None:
    """The process group of a collective: an object in torch's older operators, a name in its newer ones."""
    for value in reversed([*args, *kwargs.values()]):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return _resolve_process_group(value)
    return None


def _sent(name: str, args: Any, made: list[Tensor], ranks: int) -> int:
    """Bytes that one rank sends in a ring (Patarasuk and Yuan 2009); a broadcast is passed on from rank to rank."""
    first = size_of(leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor))
    share = (ranks - 1) / ranks
    if name.startswith(("allreduce", "all_reduce")):
        return int(2 * share * first)
    if name.startswith(("allgather", "_allgather")):  # the output comes first
        return int(share * first)
    if name.startswith("all_gather"):
        return int(share * size_of(made))
    if name.startswith(("reduce_scatter_tensor", "all_to_all")):
        return int(share * first)
    if name.startswith(("reduce_scatter", "_reduce_scatter", "alltoall")):  # the output comes first
        return int(share * size_of(leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)))
    if name.startswith(("broadcast", "send", "isend")):
        return first
    return 0
