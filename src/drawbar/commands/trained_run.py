"""A trained run, opened in Python: ``drawbar.load_run("runs/demo")``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from torch import nn

from drawbar.config.io.load_config import load_run_config
from drawbar.config.rules.rule_table import check_rules
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import NoSamples, encode_records
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split, evaluate, predict, predictions_by_record
from drawbar.evaluation.text_generation import Prompt, Sampling, generate_text
from drawbar.models.stored_base import shapes
from drawbar.tasks.batch import PredictFunction
from drawbar.tasks.encoder import TaskEncoder
from drawbar.tasks.task import Task
from drawbar.tracking.console import Console
from drawbar.tracking.run_view import parse_metrics_line
from drawbar.train.batches import eval_batching, load_split
from drawbar.train.reference import with_reference
from drawbar.train.setup import check_predicts, on_one_process, open_checkpoint, task_of_run
from drawbar.util.run_dir import METRICS_FILE

_SPLITS = ("train", "validation", "test")


def load_run(
    path: str | Path, *settings: str, checkpoint: str | None = None, task: type[Task] | None = None
) -> "TrainedRun":
    """Open a run directory in one process, to predict, generate, evaluate or use its model.

    Args:
        path: the run directory that training wrote.
        settings: as on the command line: ``device=cpu``, ``eval.micro_batch=64``.
        checkpoint: ``best``, ``latest``, a step, or a path; None for the best, or the latest if no evaluation chose
            a best one.
        task: the task's class, if a script defines it and ``task.type`` does not name it.

    Raises:
        UserError: the folder is not a run directory, or there is no such checkpoint.
    """
    loaded = load_run_config(path, settings, task.Config if task else None)
    check_rules(loaded)
    return TrainedRun(loaded.config, task, checkpoint)


class TrainedRun:
    """A run with the weights of one of its checkpoints, as opened by ``load_run``."""

    def __init__(self, config: RunConfig, task: type[Task] | None, checkpoint: str | None) -> None:
        self.config = on_one_process(config)
        self._world = Distributed(RankInfo(), choose_device(config.device, RankInfo()), config.launch.timeout)
        self.task = task_of_run(task, self.config, self._world)
        self._engine, self.step = open_checkpoint(self.task, self.config, checkpoint, self._world)
        self.model.eval()

    def __repr__(self) -> str:
        size = sum(shape.numel() for shape in shapes(self.model).values())
        return (
            f"<TrainedRun {self.config.run_dir}, step {self.step:,}: {type(self.model).__name__}, {size:,} parameters>"
        )

    def history(self) -> list[dict[str, float]]:
        """The run's metrics: a dict for each line of ``metrics.jsonl``, with ``step`` and names such as ``train/loss``.
        ``pandas.DataFrame(run.history())`` makes a table of them."""
        with (self.config.run_dir / METRICS_FILE).open("rb") as lines:
            return [values for line in lines if (values := parse_metrics_line(line)) is not None]

    @property
    def model(self) -> nn.Module:
        """The model, on its device."""
        return self._engine.module

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; None if the task has none."""
        return self.task.tokenizer

    def predict(self, records: Iterable[dict[str, Any]]) -> list[Any]:
        """A prediction for each record, in order; None if ``encode`` drops it. Records need no labels.

        Raises:
            UserError: the task does not predict, or a record cannot be encoded.
        """
        check_predicts(self.task, probabilities=False)
        task = self._task_without_labels()
        return self._ask(task, task.predict, records)

    def probabilities(self, records: Iterable[dict[str, Any]]) -> list[Any]:
        """The probability of each label, for each record.

        Raises:
            UserError: the task does not provide probabilities, or a record cannot be encoded.
        """
        check_predicts(self.task, probabilities=True)
        task = self._task_without_labels()
        return self._ask(task, task.probabilities, records)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], write: Callable[[str], None] | None = None, **sampling: Any
    ) -> list[str]:
        """The text that the model generates after each prompt. A prompt is a text, the messages of a chat, or a dict of
        ``messages`` and the other inputs of the chat template, such as ``tools``.

        Args:
            write: called with the text of a single prompt, in parts, while it is generated.
            sampling: ``max_new_tokens``, ``temperature`` (0 is greedy), ``top_k``, ``top_p`` and ``beams``.

        Raises:
            UserError: the model does not generate text.
        """
        is_one = isinstance(prompts, str | dict) or (len(prompts) > 0 and all(map(_is_message, prompts)))
        asked: list[Any] = [prompts] if is_one else list(prompts)
        return generate_text(self._engine, self.tokenizer, asked, Sampling(**sampling), write)

    def evaluate(self, split: str = "validation") -> dict[str, float]:
        """The scores on ``train``, ``validation`` or ``test``. Writes nothing but encoded data, to the cache.

        Raises:
            UserError: there is no such data.
        """
        if split not in _SPLITS:
            raise UserError(f"there is no split {split!r}", remedy=f"name one of {', '.join(_SPLITS)}")
        found = self._with_reference(load_split(self.task, split, self.config, self._world, Console()))
        evaluation = evaluate(
            self._engine, self.task, found, self._world, *eval_batching(self.task, found, self.config)
        )
        assert evaluation is not None, "evaluate returns None only if its stop_wanted asks it to stop"
        return evaluation.scores

    def _task_without_labels(self) -> Task:
        """A copy, not a new task, to keep the attributes that ``build_model`` may have set."""
        task = copy(self.task)
        task.has_labels = False
        return task

    def _ask(self, task: Task, predict_fn: PredictFunction, records: Iterable[dict[str, Any]]) -> list[Any]:
        given = list(records)
        for number, record in enumerate(given):
            if not isinstance(record, Mapping):
                raise UserError(
                    f"a record is a dict of columns, but {record!r:.80} is of type {type(record).__name__}",
                    where=f"record {number}",
                    remedy="give a list of dicts with the columns of the training data",
                )
        try:
            samples = encode_records(given, TaskEncoder(task, train=False), describe=lambda n: f"record {n}")
        except NoSamples:
            return [None] * len(given)
        split = self._with_reference(Split("records", given, samples))
        how = eval_batching(self.task, split, self.config)
        found = predictions_by_record(split, predict(self._engine, task, split, self._world, *how, predict_fn))
        return [
            task.postprocess(record, found[number]) if number in found else None for number, record in enumerate(given)
        ]

    def _with_reference(self, split: Split) -> Split:
        return with_reference(self.task, split, self.config, self._world, Console(), None, self.config.run_dir)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "messages" not in value
