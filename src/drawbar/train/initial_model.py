"""A run that starts with the model of another run: ``task.model: runs/other@best``.

The model is first copied into the run directory, as a folder that transformers loads. From then on it is a pretrained
model like any other, under every strategy, and the other run may be moved or deleted.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from drawbar.checkpoint.all_ranks import seen_by_all_nodes
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import STEP_NAME
from drawbar.config.io.load_config import SCRIPT_FILE, load_run_config
from drawbar.config.io.source import run_folder
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.models.folder import (
    INITIAL_MODEL,
    SOURCE_FILE,
    RunReference,
    check_not_from_scratch,
    initial_model_of,
    run_reference,
)
from drawbar.runtime.log import logger
from drawbar.train.checkpoint_export import CheckpointExport, ExportFormat
from drawbar.util.atomic_files import link_or_copy, new_folder
from drawbar.util.run_dir import LOCK_FILE

SINGLE_PROCESS_SETTINGS = ("launch.nproc=1", "device=cpu", "precision=fp32")
"""Settings for reading a run's model: one process, no GPU."""


class InitialModel:
    """The folder ``initial_model`` of a run directory, while its run starts.

    On exit, this context manager removes copies on nodes that do not see that folder and, after an error before the run
    has a ``config.yaml``, everything that :meth:`provide` has written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._wrote = False
        self._copies = ExitStack()

    def __enter__(self) -> "InitialModel":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._copies.__exit__(kind, *error)
        if kind is None or not self._wrote or (self._run_dir / "config.yaml").exists():
            return
        shutil.rmtree(self._run_dir / INITIAL_MODEL, ignore_errors=True)
        (self._run_dir / LOCK_FILE).unlink(missing_ok=True)
        if not any(self._run_dir.iterdir()):
            self._run_dir.rmdir()

    def provide(
        self, config: RunConfig, source_run_dir: Path, lock: Callable[[], None], world: Distributed
    ) -> Path | None:
        """If ``task.model`` names a run, copy that run's model into the run directory, unless it is there already.
        Collective.

        Args:
            source_run_dir: the run directory of the checkpoint that the run starts from; its own if there is none.
            lock: creates and locks the run directory.

        Returns:
            The folder of the copy, as this node sees it; None if ``task.model`` does not name a run.

        Raises:
            UserError: there is no such run, or it has no such checkpoint or no transformers model.
        """
        activity = f"copying the model of {getattr(config.task, 'model', None)}"

        def provide() -> bool:
            step = _step_to_copy(config, source_run_dir)
            if step is not None and initial_model_of(self._run_dir, config.task) is None:
                lock()
                self._wrote = True
                self._write(config, source_run_dir, step)
            return step is not None

        if not world.from_rank0(provide, activity):
            return None
        return self._copies.enter_context(seen_by_all_nodes(self._run_dir / INITIAL_MODEL, SOURCE_FILE, world))

    def _write(self, config: RunConfig, source_run_dir: Path, step: int) -> None:
        folder, present = self._run_dir / INITIAL_MODEL, initial_model_of(source_run_dir, config.task)
        for left in self._run_dir.glob(f"{INITIAL_MODEL}*"):  # left by a killed process, or by another task.model
            shutil.rmtree(left)
        if present is None:
            write_initial_model(config, folder, step)
        else:
            with new_folder(folder) as draft:
                shutil.copytree(present, draft, copy_function=link_or_copy, dirs_exist_ok=True)


def _step_to_copy(config: RunConfig, source_run_dir: Path) -> int | None:
    """The step of the checkpoint whose model is to be copied; None if there is nothing to copy."""
    for run_dir in (config.run_dir, source_run_dir):
        folder = initial_model_of(run_dir, config.task)
        if folder is not None:
            return int(json.loads((folder / SOURCE_FILE).read_text("utf-8"))["step"])
    reference = run_reference(config.task)
    if reference is None:
        check_not_from_scratch(config.task)
    return None if reference is None else find_step(reference)


def write_initial_model(config: RunConfig, folder: Path, step: int | None = None) -> bool:
    """Write the model that ``task.model`` names into a new folder, if it is a run's; return whether it is.

    Args:
        step: the checkpoint's step; None for the one that ``task.model`` names.

    Raises:
        UserError: as :meth:`InitialModel.provide`.
    """
    reference = run_reference(config.task)
    if reference is None:
        return False
    step = find_step(reference) if step is None else step
    with _naming_setting():
        run = run_folder(reference.run)
        source = load_run_config(run, SINGLE_PROCESS_SETTINGS).config
        alone = Distributed(RankInfo(), torch.device("cpu"), config.launch.timeout)
        export = CheckpointExport(source, None, str(step), ExportFormat(merge=source.lora is not None), alone)
    with new_folder(folder) as draft:
        export.write(draft)
        said: dict[str, Any] = {"task.model": getattr(config.task, "model", None), "run": str(run), "step": step}
        (draft / SOURCE_FILE).write_text(json.dumps(said, ensure_ascii=False, indent=2) + "\n", "utf-8")
    logger.info("task.model: step %s of %s, copied to %s", f"{step:,}", run, folder)
    return True


@contextmanager
def temporary_initial_model(config: RunConfig) -> Iterator[Path | None]:
    """Context manager that yields a temporary folder with the model that ``task.model`` names, if it is another run's
    and this run has no copy yet; else None. For use before the run directory exists. Raises as
    ``write_initial_model``."""
    if initial_model_of(config.run_dir, config.task) is not None or run_reference(config.task) is None:
        yield None
        return
    config.cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{INITIAL_MODEL}-", dir=config.cache_dir) as folder:
        write_initial_model(config, Path(folder) / INITIAL_MODEL)
        yield Path(folder) / INITIAL_MODEL


def find_step(reference: RunReference) -> int:
    """The step of the checkpoint that the reference names.

    Raises:
        UserError: there is no such run or checkpoint, or the run's task is a class defined in a script.
    """
    with _naming_setting():
        run = run_folder(reference.run)
    if (run / SCRIPT_FILE).exists():
        raise UserError(
            f"the task of {reference.run} is a class defined in a script, which is needed to build its model",
            where="task.model",
            remedy=f"export the model with that script (`python SCRIPT export {reference.run} --to FOLDER`), "
            "and set task.model=FOLDER",
        )
    directory, which = CheckpointDirectory(run / "checkpoints"), reference.which
    steps = directory.steps()
    found: int | None = None
    if which.isdecimal():
        found = int(which)
    elif which == "best":
        record = directory.best_record()
        found = None if record is None else record.step
    elif which == "latest":
        newest = directory.latest()
        match = None if newest is None else STEP_NAME.match(newest.name)
        found = None if match is None else int(match[1])
    if found in steps:
        return found
    names = ", ".join(f"{reference.run}@{step}" for step in steps)
    raise UserError(
        f"{reference.run} has no checkpoint @{which}",
        where="task.model",
        remedy=f"name one that is there: {reference.run}@latest, {names}"
        if steps
        else "train that run first: it has none",
    )


@contextmanager
def _naming_setting() -> Iterator[None]:
    """Make errors about the other run name the setting that it comes from."""
    try:
        yield
    except UserError as error:
        where = "task.model" if error.where in (None, "RUN") else f"task.model, {error.where}"
        raise UserError(error.what, where=where, remedy=error.remedy, exit_code=error.exit_code) from error
