"""The part of the table of rules that is about ``data.padding_free``; where one forbids true, ``auto`` means false."""

from drawbar.config.rules.rule import Rule

COMPILED_BY_FLASH = (
    "compiled blocks keep samples apart by torch's flash attention alone: in bf16 or fp16, on an NVIDIA GPU since "
    "Ampere, without dropout or bias of the attention; any other attention groups the samples of each micro-batch in "
    "another way, so each layer would run uncompiled in its middle"
)
"""Why ``data.padding_free`` may exclude ``parallel.compile``; ``tasks.padding`` asks the GPU and the model, too."""

PADDING_FREE = (
    Rule(
        "padding_free with dp",
        ("data.padding_free", "parallel.strategy"),
        lambda c: c.data.padding_free is True and c.parallel.features.many_devices,
        "nn.DataParallel cuts batches by rows, and a padding-free micro-batch has only one row",
        "set data.padding_free=auto, or parallel.strategy=ddp",
    ),
    Rule(
        "padding_free with context",
        ("data.padding_free", "parallel.context"),
        lambda c: c.data.padding_free is True and c.parallel.context > 1,
        "torch's ring attention cannot keep the samples of a row apart",
        "set data.padding_free=auto, or parallel.context=1",
    ),
    Rule(
        "padding_free with compile",
        ("data.padding_free", "parallel.compile", "device", "precision"),
        lambda c: (
            c.data.padding_free is True and c.parallel.compile and (c.device in ("cpu", "mps") or c.precision == "fp32")
        ),
        COMPILED_BY_FLASH,
        "set data.padding_free=auto, or parallel.compile=false",
    ),
    Rule(
        "padding_free with compiled tensor parallelism",
        ("data.padding_free", "parallel.compile", "parallel.tensor"),
        lambda c: c.data.padding_free is True and c.parallel.compile and c.parallel.tensor > 1,
        "torch compiles the blocks of tensor-parallel ranks for fixed sizes alone, and each micro-batch has samples of "
        "other lengths",
        "set data.padding_free=auto, or parallel.compile=false",
    ),
    Rule(
        "padding_free with other attention",
        ("data.padding_free", "task.attention"),
        lambda c: c.data.padding_free is True and getattr(c.task, "attention", "auto") not in ("auto", "sdpa"),
        "drawbar computes attention for each sample by itself with sdpa alone",
        "set data.padding_free=auto, or task.attention=sdpa",
    ),
)
