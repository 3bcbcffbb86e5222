"""The loss head of a language model: plain, chunked and liger's, in turn, by vocabulary."""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.device import in_rounds, peak_of
from benchmarks.gpu.setting import Place, Setting


def settings(place: Place) -> list[Setting]:
    vocabularies = (512,) if place.quick else (32768, 131072)
    made = []
    for vocabulary in vocabularies:
        arguments = {"vocabulary": vocabulary, "folder": str(place.scratch), "rounds": place.rounds}
        sizes = {"hidden": 64, "rows": 2, "length": 64} if place.quick else {"hidden": 2048, "rows": 2, "length": 4096}
        made.append(Setting(f"{vocabulary} words", "benchmarks.gpu.head:compare", {**arguments, **sizes}))
    return made


def compare(vocabulary: int, folder: str, rounds: int, hidden: int, rows: int, length: int) -> dict[str, Any]:
    """Milliseconds of forward, loss and backward of a model of one small layer, GiB at the peak, and the losses."""
    from benchmarks.common.fresh_process import missing

    ways = ["plain", "chunked", *([] if missing(["liger_kernel"]) or not torch.cuda.is_available() else ["liger"])]
    works = {way: _work(way, vocabulary, folder, hidden, rows, length) for way in ways}
    losses = {way: work().item() for way, work in works.items()}
    found = {way: {"ms": ms} for way, ms in in_rounds(works, rounds).items()}
    peaks = {way: peak_of(work) for way, work in works.items()}
    return {way: {**one, "peak_gib": peaks[way], "loss": losses[way]} for way, one in found.items()}


def _work(way: str, vocabulary: int, folder: str, hidden: int, rows: int, length: int) -> Any:
    import drawbar
    from benchmarks.peers.opened import open_task
    from drawbar.data.loader import MicroBatch

    sizes = f"hidden_size: {hidden}, intermediate_size: {hidden}, num_hidden_layers: 1, num_attention_heads: 8"
    run = open_task(
        [
            *("task.type=benchmarks.peers.byte_rows:ByteRows", "task.model=llama"),
            f"task.from_scratch={{{sizes}, vocab_size: {vocabulary}, max_position_embeddings: {length}}}",
            *(f"task.cross_entropy={way}", "precision=bf16", "parallel.strategy=single", "train.steps=1"),
            *(f"run.dir={folder}/runs", f"data.sequence_length={length}", "data.padding_free=false"),
        ]
    )
    engine = run.engine()
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    # on the device already: a copy would be timed with it
    batch = drawbar.Batch({"input_ids": tokens, "labels": tokens}, ids=list(range(rows))).to(run.world.device)
    targets = rows * (length - 1)
    return partial(engine.executor.forward_backward, [MicroBatch(batch)], 1 / targets)
