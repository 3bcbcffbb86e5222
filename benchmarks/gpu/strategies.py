"""Strategies for several GPUs on one: what they cost where there is nobody to share with."""

from typing import Any

from benchmarks.gpu.setting import Place, Setting
from benchmarks.gpu.step import rows_of, training

STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "fsdp": {"strategy": "fsdp"},
    "ddp": {"strategy": "ddp"},
    "DeepSpeed ZeRO 2": {"strategy": "deepspeed", "options": {"overrides": ["parallel.zero_stage=2"]}},
    "DeepSpeed ZeRO 3": {"strategy": "deepspeed", "options": {"overrides": ["parallel.zero_stage=3"]}},
    "single, again": {"strategy": "single"},
}


def settings(place: Place) -> list[Setting]:
    made = [
        training(place, name, settings=how, needs=("deepspeed",) * name.startswith("Deep"))
        for name, how in STRATEGIES.items()
    ]
    return [rows_of(place, "prepare"), *([made[1], made[4]] if place.quick else made)]
