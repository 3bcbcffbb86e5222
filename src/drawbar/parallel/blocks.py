"""The repeated blocks of a model: the units of sharding, recomputation and compilation."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from drawbar.errors import UserError

Forward = Callable[..., Any]


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the blocks, in order: those that transformers marks as such; for other models, the elements
    of the outermost module lists with at least two modules of the same class."""
    marked = [
        (name, module) for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    return marked or _in_lists(model, "")


def blocks_for(model: nn.Module, setting: str) -> list[nn.Module]:
    """The blocks that a setting applies to.

    Raises:
        UserError: the model has none, so the setting would do nothing.
    """
    blocks = [block for _, block in repeated_blocks(model)]
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no repeated blocks: no list with two or more modules of one class",
            where=setting,
            remedy=f"remove {setting}, or keep the model's layers in an nn.ModuleList",
        )
    return blocks


def _in_lists(model: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in model.named_children():
        inside = list(child.children())
        # compared by class name: replace_forward gives a block a new class
        alike = len(inside) > 1 and len({type(module).__qualname__ for module in inside}) == 1
        if isinstance(child, nn.ModuleList | nn.Sequential) and alike and any(True for _ in inside[0].parameters()):
            found += [(f"{prefix}{name}.{key}", module) for key, module in child.named_children()]
        else:
            found += _in_lists(child, f"{prefix}{name}.")
    return found


def replace_forward(block: nn.Module, replace: Callable[[Forward], Forward], classes: dict[type, type]) -> None:
    """Replace a block's ``forward``, in place: modules and parameters keep their names, and hooks stay outside.

    The block gets a new class, as with ``fully_shard``. A ``forward`` set on the instance would be bound to it, but
    ``nn.DataParallel`` copies the block, and ``torch.compile`` shares code between blocks only if ``self`` is an
    argument.

    Args:
        replace: maps the class's ``forward`` (with ``self`` as first argument) to the new one.
        classes: classes already made with the same ``replace``, so that equal blocks share a class.
    """
    kind = type(block)
    if kind not in classes:
        # transformers inspects the signature
        namespace = {"forward": wraps(kind.forward)(replace(kind.forward)), "__qualname__": kind.__qualname__}
        classes[kind] = type(kind.__name__, (kind,), {**namespace, "__module__": kind.__module__})
    block.__class__ = classes[kind]
