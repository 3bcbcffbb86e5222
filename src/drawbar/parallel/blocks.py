"""The repeated blocks of a model: what is sharded, computed again and compiled one by one."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from drawbar.errors import UserError

Forward = Callable[..., Any]


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the blocks, in order: those that transformers marks as such; in any other model, the
    elements of its outermost lists of two modules or more of one class."""
    marked = [
        (name, module) for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    return marked or _in_lists(model, "")


def blocks_for(model: nn.Module, setting: str) -> list[nn.Module]:
    """The blocks that a setting works on.

    Raises:
        UserError: the model has none, so the setting would do nothing.
    """
    blocks = [block for _, block in repeated_blocks(model)]
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no repeated blocks: no list of two modules or more of one class",
            where=setting,
            remedy=f"remove {setting}, or keep the model's layers in an nn.ModuleList",
        )
    return blocks


def _in_lists(model: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in model.named_children():
        inside = list(child.children())
        # compared by class name: replace_forward gives a block a class of its own
        alike = len(inside) > 1 and len({type(module).__qualname__ for module in inside}) == 1
        if isinstance(child, nn.ModuleList | nn.Sequential) and alike and any(True for _ in inside[0].parameters()):
            found += [(f"{prefix}{name}.{key}", module) for key, module in child.named_children()]
        else:
            found += _in_lists(child, f"{prefix}{name}.")
    return found


def replace_forward(block: nn.Module, replace: Callable[[Forward], Forward], classes: dict[type, type]) -> None:
    """Give a block another ``forward``, in place: modules and parameters keep their names, and hooks stay outside.

    The block gets a class of its own, as ``fully_shard`` does it. A ``forward`` that is set on the block itself would
    be tied to it: ``nn.DataParallel`` makes copies of the block, and ``torch.compile`` shares code between blocks only
    where ``self`` is an argument.

    Args:
        replace: from the ``forward`` of the class (``self`` comes first) to the new one.
        classes: classes that were made by the same ``replace``, so that equal blocks have one class.
    """
    kind = type(block)
    if kind not in classes:
        # transformers looks at the signature
        namespace = {"forward": wraps(kind.forward)(replace(kind.forward)), "__qualname__": kind.__qualname__}
        classes[kind] = type(kind.__name__, (kind,), {**namespace, "__module__": kind.__module__})
    block.__class__ = classes[kind]
