"""A training step of 1.46 B parameters, by drawbar and by others, each eager and compiled."""

from typing import Any

from benchmarks.gpu.random_model import sizes_of
from benchmarks.gpu.setting import Place, Setting

REFERENCE = (
    "one H100, bf16: 33-39% MFU for Llama 8 B (torchtitan), about 40-47% for 1-7 B (LLM Foundry, Megatron); "
    "the peak is 989 TFLOP/s"
)
ORDER = ("drawbar", "loop by hand", "Trainer", "Lightning")
NEEDS = {"Trainer": ("accelerate",), "Lightning": ("lightning",)}
AGAIN = ORDER[:2]
"""Measured a second time, in the same order, where time is left: how much does the machine itself change?"""


def settings(place: Place) -> list[Setting]:
    made = [rows_of(place, "prepare")]
    for compiled in (False, True):
        made += [_contender(place, peer, compiled) for peer in ORDER]
    made += [_contender(place, peer, compiled, ", again") for compiled in (False, True) for peer in AGAIN]
    return made[:6] if place.quick else made  # nothing new is run by the rest


def rows_of(place: Place, name: str, large: bool = False, count: int = 8) -> Setting:
    """Write the model and so many rows of full length."""
    longest = 64 if place.quick else 4096
    arguments = {"folder": str(place.scratch), "sizes": sizes_of(place.quick, large), "rows": [count, longest]}
    return Setting(name, "benchmarks.gpu.random_model:prepare", arguments, fails_alone=False)


def training(
    place: Place,
    name: str,
    more: list[str] | None = None,
    *,
    peer: str = "drawbar",
    count: int = 8,
    settings: dict[str, Any] | None = None,
    **others: Any,
) -> Setting:
    """A contender on rows of full length, by default two of them in a micro-batch; ``others``: of ``training.train``,
    and ``needs`` and ``seconds`` of the setting."""
    of_setting = {key: others.pop(key) for key in ("needs", "seconds") if key in others}
    sizes = {"rows": count, "length": 64 if place.quick else 4096, "steps": place.rounds}
    how = {"precision": place.precision, "micro_batches": 4, **(settings or {})}
    arguments = {"peer": peer, "folder": str(place.scratch), "more": more, "settings": how, **sizes, **others}
    return Setting(name, "benchmarks.gpu.training:train", arguments, **of_setting)


def _contender(place: Place, peer: str, compiled: bool, suffix: str = "") -> Setting:
    trace = None
    if peer == "drawbar" and not suffix:
        trace = str(place.results / f"step-{'compiled' if compiled else 'eager'}.trace.json.gz")
    how = {"compiled": compiled}
    name = f"{peer}{', compiled' if compiled else ''}{suffix}"
    return training(place, name, peer=peer, settings=how, trace=trace, needs=NEEDS.get(peer, ()))
