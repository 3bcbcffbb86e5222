"""The layouts that the tutorial compares, and the model that they train."""

from dataclasses import dataclass

from drawbar.config.schema.run_config import ParallelSection

VOCABULARY = 1024
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
}
ROWS, TOKENS = 8, 128
"""Of the global batch of every layout."""


@dataclass(frozen=True)
class Layout:
    """A way to spread a training over ranks."""

    settings: ParallelSection
    ranks: int = 4
    micro_batches: int = 1
    """Of each rank in a step."""


def _layout(ranks: int = 4, micro_batches: int = 1, **settings: object) -> Layout:
    return Layout(ParallelSection.model_validate(settings), ranks, micro_batches)


LAYOUTS = {
    "one process": _layout(1, strategy="single"),
    "one process, 8 micro-batches": _layout(1, 8, strategy="single"),
    "one process, activation checkpointing": _layout(1, strategy="single", activation_checkpointing="full"),
    "ddp": _layout(strategy="ddp"),
    "ddp, 2 micro-batches": _layout(4, 2, strategy="ddp"),
    "zero1": _layout(strategy="zero1"),
    "fsdp": _layout(strategy="fsdp"),
    "fsdp, 2 micro-batches": _layout(4, 2, strategy="fsdp"),
    "fsdp, reshard=false": _layout(strategy="fsdp", reshard=False),
    "fsdp, replicate=2": _layout(strategy="fsdp", replicate=2),
    "tensor=4": _layout(strategy="ddp", tensor=4),
    "tensor=4, sequence": _layout(strategy="ddp", tensor=4, sequence=True),
    "pipeline=4, gpipe": _layout(4, 8, strategy="ddp", pipeline=4, schedule="gpipe"),
    "pipeline=4, 1f1b": _layout(4, 8, strategy="ddp", pipeline=4, schedule="1f1b"),
    "context=4": _layout(strategy="ddp", context=4),
    "fsdp, tensor=2": _layout(strategy="fsdp", tensor=2),
    "fsdp, context=4": _layout(strategy="fsdp", context=4),
    "fsdp, pipeline=2": _layout(4, 4, strategy="fsdp", pipeline=2),
    "tensor=2, pipeline=2": _layout(4, 8, strategy="ddp", tensor=2, pipeline=2),
}
"""By name, as tables and figures show it."""
