"""What the server of forked processes (see :mod:`harness`) has, once for all of them: the modules that ranks and
commands need, and what transformers makes when it first loads a model from a folder."""

import ctypes
from contextlib import suppress
from importlib import import_module
from pathlib import Path

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
    *("drawbar.parity.run", "drawbar.launch.node.agent", "drawbar.launch.node.node_check", "seqeval.metrics"),
    *("pytest", "hypothesis", "harness"),
]
DEEPSPEED = [
    *("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_tp"),
    *("deepspeed.launcher.runner", "deepspeed.launcher.launch"),
]
"""Not where there are GPUs: it looks for them when it is imported, which a server that forks must not."""
_HUGE_PAGE = 2**21
_MADV_COLLAPSE = 25


def collapse_pages() -> None:
    """Put this process's private memory into huge pages, where Linux can (6.1 and later): a fork copies the table of
    pages, and the end of the child frees its copy. With 500 MB, both take 20 ms instead of 65."""
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, *rest = line.split()
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-begin // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
            is_private_memory = permissions.startswith("rw-p") and (len(rest) == 3 or rest[3:] == ["[heap]"])
            if is_private_memory and begin < end:
                madvise(begin, end - begin, _MADV_COLLAPSE)  # in vain where the system has no huge page left


try:
    from drawbar.util.torch_imports import quick_imports

    with quick_imports():
        import torch
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        for module in [*MODULES, *([] if torch.cuda.is_available() else DEEPSPEED)]:
            import_module(module)
        get_checkpoint_conversion_mapping("llama")
    collapse_pages()
except ImportError as error:
    raise RuntimeError("the server of processes would pass over an ImportError in silence") from error
