"""The rules about strategies: what they combine with, and what has no effect."""

from drawbar.config.rules.rule import Rule
from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.config.schema.task_sections import BUILT_IN_TASKS
from drawbar.config.strategies import Strategy

COMPILED_BY_FLASH = (
    "compiled blocks can separate samples only with torch's flash attention: in bf16 or fp16, on an NVIDIA GPU since "
    "Ampere, without attention dropout or bias; with any other attention, samples are grouped differently in each "
    "micro-batch, so the middle of each layer would run uncompiled"
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
        "torch compiles the blocks of tensor-parallel ranks only for fixed sizes, and each micro-batch has samples of "
        "other lengths",
        "set data.padding_free=auto, or parallel.compile=false",
    ),
    Rule(
        "padding_free with other attention",
        ("data.padding_free", "task.attention"),
        lambda c: c.data.padding_free is True and getattr(c.task, "attention", "auto") not in ("auto", "sdpa"),
        "drawbar can compute attention per sample only with sdpa",
        "set data.padding_free=auto, or task.attention=sdpa",
    ),
)


DEFAULTS = ParallelSection()
DEGREES = ("parallel.tensor", "parallel.pipeline", "parallel.context")


def _needs_whole_models(strategy: Strategy) -> bool:
    """Whether it trains with several processes, but only models that tensor, pipeline and context parallelism do not
    split."""
    return not (strategy.supports_model_parallel or strategy.one_process)


def _heeds_reduce_dtype(config: RunConfig) -> bool:
    strategy = config.strategy
    if strategy.one_process or strategy.has_engine:
        return False
    return strategy.shards_parameters or config.parallel.model_ranks == 1


def _attention(config: RunConfig) -> str:
    return getattr(config.task, "attention", "auto")  # a user's task may lack this option


def _is_flash(config: RunConfig) -> bool:
    return "flash" in _attention(config)  # including Hub kernels


def _is_liger(config: RunConfig) -> bool:
    return getattr(config.task, "cross_entropy", "auto") == "liger"


def _is_other_built_in(config: RunConfig) -> bool:
    return config.task.type in BUILT_IN_TASKS and config.task.type != "causal_lm"


DATA_PARALLEL = (
    Rule(
        "reshard and replicate",
        ("parallel.strategy", "parallel.reshard", "parallel.replicate"),
        lambda c: (
            not c.parallel.features.shards_parameters and (c.parallel.reshard is not None or c.parallel.replicate > 1)
        ),
        "these are settings of fsdp (DeepSpeed has its own in the section deepspeed)",
        "set parallel.strategy=fsdp, or remove parallel.reshard and parallel.replicate",
    ),
    Rule(
        "reduce_dtype",
        ("parallel.strategy", "parallel.reduce_dtype", *DEGREES),
        lambda c: c.parallel.reduce_dtype != DEFAULTS.reduce_dtype and not _heeds_reduce_dtype(c),
        "one process reduces no gradients, ddp reduces those of a model split over ranks in fp32, and DeepSpeed has "
        "its own setting",
        "set parallel.strategy=fsdp, or remove parallel.reduce_dtype (DeepSpeed's is communication_data_type, in its "
        "JSON)",
    ),
    Rule(
        "offload",
        ("parallel.strategy", "parallel.offload"),
        lambda c: c.parallel.offload and not c.strategy.offloads,
        "only fsdp and deepspeed can keep parameters in host memory",
        "set parallel.strategy=fsdp, or remove parallel.offload",
    ),
    Rule(
        "zero_stage",
        ("parallel.strategy", "parallel.zero_stage"),
        lambda c: c.parallel.zero_stage is not None and not c.strategy.zero_stages,
        "ZeRO stages are deepspeed's",
        "remove parallel.zero_stage; fsdp is stage 3, with reshard=false stage 2, and zero1 is stage 1",
    ),
    Rule(
        "single with several processes",
        ("parallel.strategy", "launch.nproc"),
        lambda c: c.parallel.strategy == "single" and c.launch.nproc not in ("auto", 1),
        "the strategy single is one process",
        "set parallel.strategy=auto, or launch.nproc=1",
    ),
    Rule(
        "dp with several processes",
        ("parallel.strategy", "launch.nproc"),
        lambda c: c.parallel.strategy == "dp" and c.launch.nproc not in ("auto", 1),
        "the strategy dp is one process with several devices",
        "set parallel.strategy=ddp, which has one process per device, or launch.nproc=1",
    ),
    Rule(
        "dp without CUDA",
        ("parallel.strategy", "device"),
        lambda c: c.parallel.features.many_devices and c.device in ("cpu", "mps"),
        "nn.DataParallel needs several CUDA devices",
        "set parallel.strategy=ddp, which works on CPUs too",
    ),
    Rule(
        "dp with packed rows",
        ("parallel.strategy", "data.batching"),
        lambda c: c.parallel.features.many_devices and c.data.batching == "packed",
        "nn.DataParallel runs copies of the model concurrently, which would mix up the sample boundaries",
        "set parallel.strategy=ddp, or data.batching=grouped",
    ),
    Rule(
        "dp with state of a forward",
        ("parallel.strategy", "task.type", "task.embedding_noise"),
        lambda c: (
            c.parallel.features.many_devices
            and (c.task.type in ("preference", "reward") or bool(getattr(c.task, "embedding_noise", 0)))
        ),
        "nn.DataParallel runs copies of the model concurrently, which would mix up the batches of the devices",
        "set parallel.strategy=ddp",
    ),
    Rule(
        "one process with model parallelism",
        ("parallel.strategy", *DEGREES),
        lambda c: c.parallel.features.one_process and c.parallel.model_ranks > 1,
        "this strategy uses one process, and the model is split over several",
        "set parallel.strategy=ddp or fsdp",
    ),
    Rule(
        "zero1 with model parallelism",
        ("parallel.strategy", *DEGREES),
        lambda c: _needs_whole_models(c.parallel.features) and c.parallel.model_ranks > 1,
        "torch's ZeroRedundancyOptimizer, as any strategy that needs whole parameters, does not support sharded ones",
        "set parallel.strategy=fsdp, which shards more, or ddp",
    ),
    Rule(
        "adafactor with sharded parameters",
        ("optim.name", "parallel.strategy", "parallel.tensor"),
        lambda c: c.optim.name == "adafactor" and (c.parallel.features.shards_parameters or c.parallel.tensor > 1),
        "torch's Adafactor squares norms of rows and columns in place, which fails if they are on several ranks",
        "set optim.name=adamw or muon, or parallel.strategy=zero1 or ddp without parallel.tensor",
    ),
    Rule(
        "mps with several processes",
        ("device", "launch.nproc"),
        lambda c: c.device == "mps" and c.launch.nproc not in ("auto", 1),
        "Apple's MPS is one device, and torch has no collectives for it",
        "set launch.nproc=1, or device=cpu",
    ),
    Rule(
        "mps with model parallelism",
        ("device", *DEGREES),
        lambda c: c.device == "mps" and c.parallel.model_ranks > 1,
        "Apple's MPS is one device, and torch has no collectives for it",
        "set device=cpu, or the degrees to 1",
    ),
)

MODEL_PARALLEL = (
    Rule(
        "sequence",
        ("parallel.sequence", "parallel.tensor"),
        lambda c: c.parallel.sequence and c.parallel.tensor == 1,
        "sequence parallelism shards activations over the tensor-parallel ranks, and there is only one",
        "set parallel.tensor, or remove parallel.sequence",
    ),
    Rule(
        "sequence and activation checkpointing in a pipeline",
        ("parallel.sequence", "parallel.pipeline", "parallel.activation_checkpointing"),
        lambda c: c.parallel.sequence and c.parallel.pipeline > 1 and c.parallel.activation_checkpointing != "none",
        "a stage works on several micro-batches at once, and recomputation would use the length of another micro-batch",
        "remove parallel.sequence, or set parallel.activation_checkpointing=none",
    ),
    Rule(
        "compiled tensor-parallel blocks that are computed again as a whole",
        ("parallel.tensor", "parallel.compile", "parallel.activation_checkpointing"),
        lambda c: (
            c.parallel.tensor > 1
            and c.parallel.compile
            and c.parallel.activation_checkpointing not in ("none", "selective", "attention")
        ),
        "torch cannot then save what the compiled blocks of tensor-parallel ranks pass to their backward pass",
        "set parallel.activation_checkpointing=selective or attention, or parallel.compile=false",
    ),
    Rule(
        "schedule and cuts",
        ("parallel.pipeline", "parallel.schedule", "parallel.cuts"),
        lambda c: (
            c.parallel.pipeline == 1 and (c.parallel.schedule != DEFAULTS.schedule or c.parallel.cuts is not None)
        ),
        "there is only one stage, so nothing to schedule or cut",
        "set parallel.pipeline, or remove parallel.schedule and parallel.cuts",
    ),
    Rule(
        "pipeline of other tasks",
        ("parallel.pipeline", "task.type"),
        lambda c: c.parallel.pipeline > 1 and _is_other_built_in(c) and c.task.type != "preference",
        "only decoders that predict the next token can be split into stages",
        "set parallel.pipeline=1; parallel.tensor and fsdp also make a model fit",
    ),
    Rule(
        "embedding noise in a split model",
        ("task.embedding_noise", "parallel.tensor", "parallel.pipeline", "parallel.context"),
        lambda c: (
            bool(getattr(c.task, "embedding_noise", 0))
            and max(c.parallel.tensor, c.parallel.pipeline, c.parallel.context) > 1
        ),
        "noise is added where the embeddings of whole samples are whole",
        "set parallel.strategy=fsdp without these, or remove task.embedding_noise",
    ),
    Rule(
        "context on other devices",
        ("parallel.context", "device"),
        lambda c: c.parallel.context > 1 and c.device in ("cpu", "mps"),
        "torch's ring attention consists of CUDA kernels",
        "set parallel.context=1, or device=cuda",
    ),
    Rule(
        "context of other tasks",
        ("parallel.context", "task.type"),
        lambda c: c.parallel.context > 1 and _is_other_built_in(c),
        "only tasks that predict the next token can cut a sequence over ranks",
        "set parallel.context=1",
    ),
    Rule(
        "context with packed rows",
        ("parallel.context", "data.batching"),
        lambda c: c.parallel.context > 1 and c.data.batching == "packed",
        "torch's ring attention has no mask to separate the samples of a row",
        "set parallel.context=1, or data.batching=grouped",
    ),
    Rule(
        "context with pipeline",
        ("parallel.context", "parallel.pipeline"),
        lambda c: c.parallel.context > 1 and c.parallel.pipeline > 1,
        "a pipeline runs forward and backward of several micro-batches at once, and torch cuts one at a time",
        "set parallel.context=1 or parallel.pipeline=1",
    ),
    Rule(
        "context with sequence",
        ("parallel.context", "parallel.sequence"),
        lambda c: c.parallel.context > 1 and c.parallel.sequence,
        "both shard the same activations along the sequence",
        "remove parallel.sequence",
    ),
    Rule(
        "context with other attention",
        ("parallel.context", "task.attention"),
        lambda c: c.parallel.context > 1 and _attention(c) not in ("auto", "sdpa"),
        "torch's ring attention replaces only sdpa",
        "set task.attention=sdpa, or parallel.context=1",
    ),
)

KERNELS = (
    Rule(
        "flash attention without CUDA",
        ("task.attention", "device"),
        lambda c: _is_flash(c) and c.device in ("cpu", "mps"),
        "flash attention is a CUDA kernel",
        "set task.attention=sdpa",
    ),
    Rule(
        "flash attention in fp32",
        ("task.attention", "precision"),
        lambda c: _is_flash(c) and c.precision == "fp32",
        "flash attention supports only bf16 and fp16",
        "set precision=bf16, or task.attention=sdpa",
    ),
    Rule(
        "liger-kernel without CUDA",
        ("task.cross_entropy", "device"),
        lambda c: _is_liger(c) and c.device in ("cpu", "mps"),
        "liger-kernel only has kernels for CUDA devices",
        "set task.cross_entropy=auto",
    ),
    Rule(
        "liger-kernel in fp16",
        ("task.cross_entropy", "precision"),
        lambda c: _is_liger(c) and c.precision == "fp16",
        "liger-kernel rounds the gradients to fp16 before they are scaled",
        "set task.cross_entropy=auto, or precision=bf16",
    ),
    Rule(
        "liger-kernel with tensor",
        ("task.cross_entropy", "parallel.tensor"),
        lambda c: _is_liger(c) and c.parallel.tensor > 1,
        "liger-kernel needs the whole vocabulary, and each rank has only a part of it",
        "set task.cross_entropy=auto",
    ),
)

PARALLEL: tuple[Rule, ...] = DATA_PARALLEL + MODEL_PARALLEL + KERNELS

TRAINING = (
    Rule(
        "check_replicas",
        ("parallel.strategy", "parallel.check_replicas"),
        lambda c: c.parallel.check_replicas is not None and c.strategy.one_process,
        "in one process, there are no other ranks to compare the weights with",
        "remove parallel.check_replicas",
    ),
    Rule(
        "on_spike",
        ("parallel.strategy", "train.on_spike"),
        lambda c: c.train.on_spike != "warn" and c.strategy.has_engine,
        "DeepSpeed's engine makes every update",
        "set train.on_spike=warn, or another parallel.strategy",
    ),
    Rule(
        "fp8 on other devices",
        ("parallel.fp8", "device"),
        lambda c: c.parallel.fp8 is not None and c.device in ("cpu", "mps"),
        "fp8 needs NVIDIA GPUs with compute capability 8.9 or higher",
        "set parallel.fp8=null, or device=cuda",
    ),
    Rule(
        "fp8 in other precisions",
        ("parallel.fp8", "precision"),
        lambda c: c.parallel.fp8 is not None and c.precision not in ("auto", "bf16"),
        "layers that multiply in fp8 take and return bf16",
        "set precision=bf16, or parallel.fp8=null",
    ),
    Rule(
        "fp8 with other strategies",
        ("parallel.fp8", "parallel.strategy"),
        lambda c: c.parallel.fp8 is not None and (c.strategy.many_devices or c.strategy.has_engine),
        "torchao's layers have not been tested with DeepSpeed's and nn.DataParallel's copies of a model",
        "set parallel.strategy=fsdp, zero1 or ddp, or parallel.fp8=null",
    ),
    Rule(
        "fp8 with model parallelism",
        ("parallel.fp8", *DEGREES),
        lambda c: c.parallel.fp8 is not None and c.parallel.model_ranks > 1,
        "torchao's layers have been tested only in unsplit models",
        "set parallel.strategy=fsdp and the degrees to 1, or parallel.fp8=null",
    ),
    Rule(
        "fp8 with adapters",
        ("parallel.fp8", "lora"),
        lambda c: c.parallel.fp8 is not None and c.lora is not None,
        "fp8 applies to trained layers, and under adapters they are frozen",
        "set parallel.fp8=null, or remove lora",
    ),
)
"""Rules for training only, as nothing else computes in fp8."""

FLEX_TRAINING = Rule(
    "flex attention on the CPU",
    ("task.attention", "device"),
    lambda c: _attention(c) == "flex_attention" and c.device == "cpu",
    "torch's flex attention has no backward pass on CPUs",
    "set task.attention=sdpa",
)
