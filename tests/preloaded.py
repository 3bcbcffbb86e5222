"""What the server of forked processes (see :mod:`harness`) has, once for all of them: the modules that ranks and
commands need, and what transformers makes when it first loads a model from a folder."""

from importlib import import_module

MODULES = [
    *("torch.distributed.run", "torch.utils.tensorboard"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert", "t5", "bart", "bloom")),
    *("datasets", "pandas", "peft", "peft.tuners.lora", "sacrebleu", "sklearn.metrics"),
    *(f"drawbar.cli.{name}" for name in ("evaluate", "export", "generate", "predict", "prepare", "train")),
    *(
        "drawbar.train.trainer",
        "drawbar.commands.score_run",
        "drawbar.commands.prepare_data",
        "drawbar.commands.export_run",
    ),
    *("drawbar.parity.run", "drawbar.launch.agent", "drawbar.launch.node_check", "seqeval.metrics"),
    *("pytest", "hypothesis", "harness"),
]
DEEPSPEED = [
    *("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_tp"),
    *("deepspeed.launcher.runner", "deepspeed.launcher.launch"),
]
"""Not where there are GPUs: it looks for them when it is imported, which a server that forks must not."""

try:
    from drawbar.util.torch_imports import quick_imports

    with quick_imports():
        import torch
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        for module in [*MODULES, *([] if torch.cuda.is_available() else DEEPSPEED)]:
            import_module(module)
        get_checkpoint_conversion_mapping("llama")
except ImportError as error:
    raise RuntimeError("the server of processes would pass over an ImportError in silence") from error
