"""drawbar: write the training task once, run it anywhere, and prove that it is the same run.

The names below are the library's public face. They are imported when they are first used, so that the command line
answers without importing torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from drawbar.threads import let_threads_sleep
from drawbar.util.torch_imports import silence_ranks, silence_torchao

if TYPE_CHECKING:
    from drawbar.cli import main
    from drawbar.commands.trained_run import load_run
    from drawbar.config.io.load_config import load_config
    from drawbar.config.schema.run_config import RunConfig
    from drawbar.config.schema.task_sections import TaskConfig
    from drawbar.config.strategies import Strategy
    from drawbar.data.readers import BadRecord, FileReader, RawRecord
    from drawbar.errors import UserError
    from drawbar.tasks.batch import Batch
    from drawbar.tasks.causal_lm import CausalLM
    from drawbar.tasks.classification import SequenceClassification, TokenClassification
    from drawbar.tasks.masked_lm import MaskedLM
    from drawbar.tasks.preference import Preference, Reward
    from drawbar.tasks.seq2seq import Seq2Seq
    from drawbar.tasks.task import Task
    from drawbar.tasks.task_context import TaskContext
    from drawbar.tracking.tracker import TrackedRun, Tracker
    from drawbar.train.callback import Callback, RunHandle
    from drawbar.train.step import StepInfo
    from drawbar.train.trainer import Trainer

__version__ = "0.1.0"

let_threads_sleep()  # first: OpenMP reads these settings when torch is loaded
# a rank of torchrun, DeepSpeed's launcher or another one; or the launcher of a node that has others beside it
if "LOCAL_RANK" in os.environ or "DRAWBAR_RENDEZVOUS" in os.environ:
    silence_ranks()
silence_torchao()  # before transformers is imported, in whatever process

_HOMES = {
    "BadRecord": "drawbar.data.readers",
    "Batch": "drawbar.tasks.batch",
    "Callback": "drawbar.train.callback",
    "CausalLM": "drawbar.tasks.causal_lm",
    "FileReader": "drawbar.data.readers",
    "MaskedLM": "drawbar.tasks.masked_lm",
    "Preference": "drawbar.tasks.preference",
    "Reward": "drawbar.tasks.preference",
    "RunConfig": "drawbar.config.schema.run_config",
    "RunHandle": "drawbar.train.callback",
    "Seq2Seq": "drawbar.tasks.seq2seq",
    "SequenceClassification": "drawbar.tasks.classification",
    "StepInfo": "drawbar.train.step",
    "Strategy": "drawbar.config.strategies",
    "Task": "drawbar.tasks.task",
    "TaskConfig": "drawbar.config.schema.task_sections",
    "TaskContext": "drawbar.tasks.task_context",
    "TokenClassification": "drawbar.tasks.classification",
    "TrackedRun": "drawbar.tracking.tracker",
    "Tracker": "drawbar.tracking.tracker",
    "Trainer": "drawbar.train.trainer",
    "RawRecord": "drawbar.data.readers",
    "UserError": "drawbar.errors",
    "load_config": "drawbar.config.io.load_config",
    "load_run": "drawbar.commands.trained_run",
    "main": "drawbar.cli",
}

__all__ = [
    "BadRecord",
    "Batch",
    "Callback",
    "CausalLM",
    "FileReader",
    "MaskedLM",
    "Preference",
    "RawRecord",
    "Reward",
    "RunConfig",
    "RunHandle",
    "Seq2Seq",
    "SequenceClassification",
    "StepInfo",
    "Strategy",
    "Task",
    "TaskConfig",
    "TaskContext",
    "TokenClassification",
    "TrackedRun",
    "Tracker",
    "Trainer",
    "UserError",
    "load_config",
    "load_run",
    "main",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'drawbar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
