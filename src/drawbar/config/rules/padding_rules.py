"""The part of the table of rules that is about ``data.padding_free``; where one forbids true, ``auto`` means false."""

from drawbar.config.rules.rule import Rule

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
        ("data.padding_free", "parallel.compile"),
        lambda c: c.data.padding_free is True and c.parallel.compile,
        "each micro-batch groups its samples in another way, which torch would compile anew",
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
