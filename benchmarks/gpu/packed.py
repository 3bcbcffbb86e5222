"""Samples of very different lengths: padded, padding-free, and packed, each eager and compiled."""

from benchmarks.gpu.random_model import sizes_of
from benchmarks.gpu.setting import Place, Setting

WAYS = {
    "padding-free": ("data.batching=padded", "data.padding_free=true"),
    "packed, varlen": ("data.batching=packed", "data.padding_free=true"),
    "packed, mask": ("data.batching=packed", "data.padding_free=false"),
    "padded": ("data.batching=padded", "data.padding_free=false"),
}
REFERENCE = "tokens that are no padding; compile adds graphs, breaks and frames: more frames than blocks are recompiles"


def settings(place: Place) -> list[Setting]:
    longest, shortest, count = (64, 8, 16) if place.quick else (4096, 64, 256)
    write = {"folder": str(place.scratch), "sizes": sizes_of(place.quick), "rows": [count, longest, shortest]}
    made = [Setting("prepare", "benchmarks.gpu.random_model:prepare", write, fails_alone=False)]
    for compiled in (False, True):
        for name, how in WAYS.items():
            rows = 8 if "packed" in name else 32
            arguments = {
                "peer": "drawbar",
                "folder": str(place.scratch),
                "rows": min(rows, count),
                "length": longest,
                "steps": 2 if place.quick else 10,
                "settings": {"precision": place.precision, "compiled": compiled},
                "more": [*how, f"train.micro_batch_tokens={2 * longest}"],
            }
            made.append(Setting(name + ", compiled" * compiled, "benchmarks.gpu.training:train", arguments))
    return [*made[:3], made[5]] if place.quick else made
