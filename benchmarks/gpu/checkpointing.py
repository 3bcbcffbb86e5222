"""What activation checkpointing costs in time and gives in memory."""

from benchmarks.gpu.setting import Place, Setting
from benchmarks.gpu.step import rows_of, training


def settings(place: Place) -> list[Setting]:
    how = ("none", "selective", "attention", "full")
    made = [
        training(place, f"{one}{', compiled' * compiled}", [f"parallel.activation_checkpointing={one}"],
                 settings={"compiled": compiled})
        for compiled in (False, True) for one in how
    ]  # fmt: skip
    return [rows_of(place, "prepare"), *(made[:2] if place.quick else made)]
