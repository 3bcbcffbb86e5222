"""LoRA on a random base of 8 B parameters in bf16, beside a loop with PEFT."""

from functools import partial

from benchmarks.gpu.random_model import RANK
from benchmarks.gpu.setting import Place, Setting
from benchmarks.gpu.step import rows_of, training

REFERENCE = "one H100, LoRA on 8 B: 12,473 tokens/s (NeMo AutoModel)"
ROWS = 4
"""Of a step, each a micro-batch."""


def settings(place: Place) -> list[Setting]:
    lora = [f"lora={{rank: {RANK}, alpha: {2 * RANK}, modules: linear}}"]
    of = partial(training, place, count=ROWS, lora=True, needs=("peft",), seconds=240)
    made = [
        of("drawbar", lora, settings={"micro_batches": ROWS}),
        of("loop with PEFT", peer="loop by hand", settings={"micro_batches": ROWS}),
        of("drawbar, compiled", lora, settings={"micro_batches": ROWS, "compiled": True}),
        of(
            "drawbar, full checkpointing",
            [*lora, "parallel.activation_checkpointing=full"],
            settings={"micro_batches": ROWS},
        ),
    ]
    return [rows_of(place, "prepare", large=True, count=ROWS), *(made[:2] if place.quick else made)]
