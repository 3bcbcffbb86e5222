"""Folders that should hold a model, and runs that are named in place of one: ``task.model: runs/other@best``."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.errors import UserError
from drawbar.util.file_content import Content, content_of
from drawbar.util.run_dir import is_run_dir

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
"""In a folder that peft wrote."""
INITIAL_MODEL = "initial_model"
"""In a run directory: the model that the run began with, where that is the checkpoint of another run."""
SOURCE_FILE = "source.json"
"""In that folder: the value of ``task.model``, and the checkpoint that it referred to."""
_HOLDS = {".json": None, ".safetensors": "safetensors"}
"""By the end of a file's name, the kind of its content (``util.file_content``)."""


@dataclass(frozen=True)
class RunReference:
    """A checkpoint of a run, in place of a model."""

    run: Path
    which: str
    """``best``, ``latest`` or a step; it need not exist."""


def run_reference(options: Any) -> RunReference | None:
    """The run that the option ``model`` of a task refers to, if any: ``RUN``, ``RUN@best``, ``RUN@STEP``,
    ``RUN@latest`` (or ``@last``).

    A name with an @ that is no folder counts as one, whether or not there is such a run. None for a folder of a model,
    even if an @ is in its name, and for any other name.
    """
    name = getattr(options, "model", None)
    if not isinstance(name, str) or getattr(options, "from_scratch", None) is not None:
        return None
    folder = Path(name)
    if folder.is_dir():
        is_run = is_run_dir(folder) and not (folder / CONFIG).exists()
        return RunReference(folder, "latest") if is_run else None
    run, at, which = name.rpartition("@")
    return RunReference(Path(run), "latest" if which == "last" else which) if at else None


def initial_model_of(run_dir: Path, options: Any) -> Path | None:
    """The folder of a run with a copy of the model that ``task.model`` names; None if the run has no such copy."""
    folder = run_dir / INITIAL_MODEL
    try:
        said = json.loads((folder / SOURCE_FILE).read_text("utf-8"))["task.model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_it = said == getattr(options, "model", None) and getattr(options, "from_scratch", None) is None
    return folder if is_it else None


def check_not_from_scratch(options: Any) -> None:
    """Raise UserError where the option ``model`` of a task names a checkpoint of a run, and ``from_scratch`` is set."""
    name = getattr(options, "model", None)
    if getattr(options, "from_scratch", None) is None or not isinstance(name, str) or Path(name).is_dir():
        return
    run, at, _ = name.rpartition("@")
    if at and _run_of(Path(run)) is not None:
        raise UserError(
            f"task.model names a checkpoint of a run, {name}, whose weights task.from_scratch would leave out",
            where="task.model, task.from_scratch",
            remedy="leave out task.from_scratch (task.from_scratch=null) to begin with the model of that run",
        )


def check_model_folder(name: str) -> None:
    """Check that ``name``, if it is a folder and not a Hub name, has a readable ``config.json``.

    Without that file transformers does not find what else is in the folder, such as a tokenizer: ``config.json`` says
    what to look for.

    Raises:
        UserError: the folder is empty, or has no such file, or one that is not a JSON object.
    """
    folder = Path(name)
    if not folder.is_dir():
        return
    path = folder / CONFIG
    if not path.is_file():
        run = _run_of(folder)
        if run is not None:
            raise UserError(
                f"{name} is {'a run' if run == folder else 'a checkpoint of a run'}, and not a folder of a model",
                where="task.model",
                remedy=f"name one of its checkpoints: {run}@best, {run}@latest, {run}@STEP; or write "
                f"the run's model as a folder, and name that: `drawbar export {run} --to FOLDER`",
            )
        what = f"has no {CONFIG}" if any(folder.iterdir()) else "is empty"
        remedy = f"name the folder that the model was saved to: it holds {CONFIG} and safetensors files"
        if (folder / ADAPTER_CONFIG).is_file():
            what = "holds adapters, and not the model that they adapt"
            remedy = (
                "name the merged model: of a run, `drawbar export RUN --merge --to FOLDER`; of others, peft's "
                f"merge_and_unload; {ADAPTER_CONFIG} says which model it is"
            )
        raise UserError(f"the folder {name} {what}", where="task.model", remedy=remedy)
    for file in (path, folder / GENERATION_CONFIG):  # transformers does without the second where it cannot read it
        content = None
        with suppress(OSError):
            content = content_of(file)
        if content is not None:
            raise UserError(f"{file} is {content.what}", where="task.model", remedy=content.remedy_for(file))
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        at = f", line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else f": {error}"
        kind = "cannot be read" if isinstance(error, OSError) else "is not JSON"
        raise _broken(f"{path} {kind}{at}") from error
    if not isinstance(found, dict):
        raise _broken(f"{path} is not a JSON object, but a {type(found).__name__}")


def foreign_file(folder: Path) -> tuple[Path, Content] | None:
    """A file of a model's folder that is not what its name says, and what it is instead; None if there is none."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _HOLDS:
            with suppress(OSError):
                found = content_of(path)
                if found is not None and found.name != _HOLDS[path.suffix]:
                    return path, found
    return None


def _run_of(folder: Path) -> Path | None:
    """The run directory that the folder is, or that it is a checkpoint of; None if it is neither."""
    for run in (folder, folder.absolute().parent.parent):
        if is_run_dir(run):
            of_checkpoint = folder.absolute().parent == run / "checkpoints"
            return run if run == folder or of_checkpoint else None
    return None


def _broken(what: str) -> UserError:
    return UserError(
        what, where="task.model", remedy="repair the file, or save or download the model again: it may be cut short"
    )
