"""Matrix products in fp8, compiled, beside bf16. torchao is to be on the path for this alone."""

from benchmarks.gpu.setting import Place, Setting
from benchmarks.gpu.step import rows_of, training


def settings(place: Place) -> list[Setting]:
    made = [rows_of(place, "prepare")]
    for recipe in ("null", "tensorwise", "rowwise"):
        needs = () if recipe == "null" else ("torchao",)
        how = {"compiled": True}
        made.append(training(place, recipe, [f"parallel.fp8={recipe}"], settings=how, needs=needs))
    return made
