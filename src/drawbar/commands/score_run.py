"""Evaluation, prediction and generation from a run directory."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from drawbar.checkpoint.space import explain_disk_errors
from drawbar.commands.output_files import write_lines
from drawbar.config.io.compare import changed_records
from drawbar.config.io.load_config import load_config
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.rules.rule_table import check_degrees
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.readers import BadRecord
from drawbar.data.sources import Record, Records
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split, evaluate, predict, predictions_by_record, write_results
from drawbar.runtime.log import errors_in_log, logger, open_log_file, start_logging
from drawbar.runtime.seed import seed_everything
from drawbar.tasks.method_errors import is_user_defined
from drawbar.tasks.task import Task
from drawbar.tracking.console import Console, make_console
from drawbar.train.batches import OpenedSplit, encode_split, eval_batching, open_split
from drawbar.train.reference import with_reference
from drawbar.train.setup import check_predicts, open_checkpoint, task_of_run
from drawbar.util.atomic_files import is_stream


@contextmanager
def _joined(config: RunConfig) -> Iterator[tuple[Distributed, Console]]:
    """The process group of a command, and its console."""
    rank_info = RankInfo.from_environment()
    check_degrees(config, rank_info.world_size)
    dims = ParallelDims.of(config.parallel, rank_info.world_size)
    device = choose_device(config.device, rank_info)
    console = make_console(rank_info.is_rank0)
    start_logging(rank_info.rank, console.logging_handler())
    seed_everything(config.run.seed, dims.seed_rank(rank_info.rank))  # for predictions that are sampled
    try:
        with errors_in_log(), Distributed(rank_info, device, config.launch.timeout, dims) as world:
            yield world, console
    finally:
        console.stop()


def evaluate_run(
    config: RunConfig, task_type: type[Task] | None, split_name: str, checkpoint: str | None
) -> dict[str, float]:
    """Evaluate one checkpoint on one split; print the scores and write them to ``_results_folder``.

    Raises:
        UserError: there is no such checkpoint or data.
    """
    with explain_disk_errors(config.run_dir), _joined(config) as (world, console):
        task = task_of_run(task_type, config, world)
        opened = open_split(task, split_name, config, world)
        engine, step, split = _open_both(task, opened, config, checkpoint, world, console)
        with closing(engine):
            open_log_file(config.run_dir, world.rank)
            evaluation = evaluate(
                engine,
                task,
                split,
                world,
                *eval_batching(task, split, config),
                progress=lambda done, total: console.phase(f"evaluating {split_name}", done, total),
            )
        assert evaluation is not None, "evaluate returns None only if its stop_wanted asks it to stop"
        if world.is_rank0:
            with world.working("writing the scores"):
                folder, others = _results_folder(config, split_name)
                write_results(folder, evaluation, step)
            if others:
                console.message(f"{folder}: scores on other records than the run's ({', '.join(others)})")
            console.evaluation(step, {f"eval/{split_name}/{name}": value for name, value in evaluation.scores.items()})
    return evaluation.scores


def _open_both(
    task: Task, opened: OpenedSplit, config: RunConfig, checkpoint: str | None, world: Distributed, console: Console
) -> tuple[Engine, int, Split]:
    """An engine with the weights of a checkpoint, its step, and the encoded split. The checkpoint is found before
    anything is encoded, and loaded after the reference model was asked."""
    splits: list[Split] = []

    def encode(engine: Engine) -> None:
        with nullcontext() if task.has_labels else _hints(task, config):
            split = encode_split(task, opened, config, world, console)
        splits.append(with_reference(task, split, config, world, console, engine, config.run_dir))

    engine, step = open_checkpoint(task, config, checkpoint, world, encode)
    return engine, step, splits[0]


def _results_folder(config: RunConfig, split_name: str) -> tuple[Path, list[str]]:
    """``eval/<split>``; or ``eval/<split>-other``, and the settings that give the split other records than the run's:
    scores on a few records must not pass for scores on all."""
    own = load_config(config.run_dir / "config.yaml", task=type(config.task)).config
    others = changed_records(own, config, split_name)
    return config.run_dir / "eval" / (f"{split_name}-other" if others else split_name), others


def predict_from_run(
    config: RunConfig, task_type: type[Task] | None, output: Path, checkpoint: str | None, probabilities: bool = False
) -> None:
    """Predict for the records of ``data.test``, which need no labels, and write each record with its prediction.

    Args:
        output: a ``.jsonl`` file with a line for each record, in order; it appears when it is complete. ``prediction``
            is null if there is none, because the record is bad or ``encode`` dropped it.
        checkpoint: ``best``, ``latest``, a step or a path; None for the best, or the latest if there is no best one.
        probabilities: also write these.

    Raises:
        UserError: the task does not predict, there is no such checkpoint, or the input cannot be read or encoded.
    """
    with _joined(config) as (world, console):
        task = task_of_run(task_type, config, world, has_labels=False)
        check_predicts(task, probabilities)
        with _hints(task, config):
            opened = open_split(task, "test", config, world)
        engine, _, split = _open_both(task, opened, config, checkpoint, world, console)
        with closing(engine):
            asked = {"prediction": task.predict} | ({"probabilities": task.probabilities} if probabilities else {})
            how, progress = eval_batching(task, split, config), partial(console.phase, "predicting")
            answers = {
                name: predictions_by_record(split, predict(engine, task, split, world, *how, predict_fn, progress))
                for name, predict_fn in asked.items()
            }
        if world.is_rank0:
            with world.working("writing the predictions"):
                count = write_lines(output, _with_answers(task, opened, answers))
            left_out = count - len(answers["prediction"])
            missing = f", {left_out:,} without prediction" if left_out else ""
            said = logger.info if is_stream(output) else console.message  # /dev/stdout holds the predictions alone
            said(f"{output}: {count:,} records{missing}")


@contextmanager
def _hints(task: Task, config: RunConfig) -> Iterator[None]:
    """Context for reading the test data: makes an error name ``--input``, and adds hints for common mistakes with data
    without labels."""
    try:
        yield
    except UserError as error:
        if error.where == "data.test":
            error.where = "--input"
            if config.data.test is None:
                error.remedy = "name a file with --input FILE"
        hint = ""
        if config.data.columns is not None and "the setting columns names" in error.what:
            hint = f"name only the columns that it has, as in data.columns=[{config.data.columns[0]}]"
        elif error.where == "data.rename":
            hint = "rename only what it has: data.rename=null, then data.rename.NEW=OLD for each column"
        if hint:
            error.remedy = f"{error.remedy}; if the input has no labels, {hint}"
        if is_user_defined(task, "encode"):
            error.remedy = f"{error.remedy}; encode() must do without targets if self.has_labels is False"
        raise


def _with_answers(
    task: Task, opened: OpenedSplit, answers: Mapping[str, Mapping[int, Any]]
) -> Iterator[dict[str, Any]]:
    """Every input record with its prediction; in place of a bad record, what is wrong with it.

    Args:
        answers: for each requested output (such as ``prediction``), its values by record number.

    Raises:
        UserError: at the end, if the input has changed since the predictions were made.
    """
    number = 0
    for record in _with_bad(opened.records):
        if isinstance(record, BadRecord):
            yield {"error": f"{record.where}: {record.what}", **dict.fromkeys(answers)}
        else:
            found = {name: by_number.get(number) for name, by_number in answers.items()}
            if number in answers["prediction"]:
                found = {name: task.postprocess(record, answer) for name, answer in found.items()}
            yield {**record, **found}
            number += 1
    opened.check_unchanged()


def _with_bad(records: Iterable[Record]) -> Iterator[Record | BadRecord]:
    """The records, with the bad ones that were left out in their places."""
    if not isinstance(records, Records):
        yield from records
        return
    for stream in records.streams:
        for _, _, record in stream.read_all():
            yield record
