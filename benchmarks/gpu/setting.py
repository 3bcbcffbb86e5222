"""What a case consists of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One measurement, in a process of its own."""

    name: str
    function: str
    """``package.module:function``, called with ``arguments``; it returns what JSON can hold."""
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Packages without which there is nothing to measure."""
    seconds: float = 200
    """It is killed after so long."""
    fails_alone: bool = True
    """Whether those after it can be measured without it."""


@dataclass(frozen=True)
class Place:
    """Where a case works."""

    quick: bool
    """Tiny sizes and few rounds: does it run?"""
    scratch: Path
    """Empty at first, and deleted afterwards; all settings of the case see it."""
    results: Path
    """For traces."""

    @property
    def rounds(self) -> int:
        return 2 if self.quick else 7

    @property
    def precision(self) -> str:
        """Many a CPU is far slower in bf16."""
        return "fp32" if self.quick else "bf16"


def among(settings: Sequence[Setting], wanted: Sequence[str]) -> list[Setting]:
    """Those whose names contain one of the words, and those without which they cannot be measured; all for none."""
    if not wanted:
        return list(settings)
    return [one for one in settings if not one.fails_alone or any(word in one.name for word in wanted)]
