"""``drawbar init``: a small project, ready to train, from one of the folders in ``drawbar/templates``."""

import re
import shlex
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from drawbar.errors import ExitCode, UserError

TEMPLATES = {
    "language_model": "a language model from scratch, on lines of text",
    "classification": "a label for each text, from a table",
    "seq2seq": "a text from a text: a tiny translator, scored by BLEU",
    "instruction_tuning": "answers to prompts; the loss covers only the answers",
    "custom_task": "your own model, loss and scores in task.py",
}
"""The folders of ``drawbar/templates``, each with its purpose."""

SUFFIX = "-tpl"
"""Suffix of template files that tools would otherwise take for part of drawbar: ``task.py-tpl``."""

SCHEMA = "config.schema.json"
"""The JSON schema that the first line of ``config.yaml`` names, so that editors validate and complete it offline."""

GITIGNORE = "runs/\n__pycache__/\n.pytest_cache/\n"

_LISTED = "\n".join(f"  {name:<20}{meaning}" for name, meaning in TEMPLATES.items())


@click.command(
    short_help="Create a small project, ready to train.",
    epilog=f"""\b
Templates:
{_LISTED}

\b
Examples:
  drawbar init my-model
  drawbar init reviews --template classification
  drawbar init .
""",
)
@click.argument("folder", metavar="DIR")
@click.option(
    "--template",
    type=click.Choice(list(TEMPLATES)),
    default="language_model",
    show_default=True,
    help="Kind of project; see the list below.",
)
def init(folder: str, template: str) -> int:
    """Create a small project in DIR (a new or empty folder): settings, data, a test. It is ready to train."""
    target = Path(folder)
    name = write_project(target, template)
    click.echo(f"{target}: the project {name}, from the template {template}\n\nNext:")
    if target.resolve() != Path.cwd():
        click.echo(f"  cd {shlex.quote(str(target))}")
    click.echo(f"  drawbar train config.yaml\n  drawbar eval runs/{name}\n\nREADME.md says what to change first.")
    return ExitCode.DONE


def write_project(target: Path, template: str) -> str:
    """Fill ``target`` with all of a template's files, or with none if that fails.

    Args:
        target: a folder that does not exist or is empty.
        template: one of ``TEMPLATES``.

    Returns:
        The project's name: the folder's name, changed if it is not a valid run name.

    Raises:
        UserError: the folder is not empty, or cannot be written.
    """
    from drawbar.commands.output_files import check_new_folder

    name = project_name(target)
    check_new_folder(target, "DIR")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".drawbar-init-", dir=target.parent) as draft:
            project = Path(draft) / "project"
            _fill(project, files("drawbar") / "templates" / template, name)
            if not target.exists():
                project.rename(target)
            for path in project.iterdir() if project.exists() else ():  # an empty target may be the current folder
                path.rename(target / path.name)
    except OSError as error:
        raise UserError(
            f"the project cannot be written: {error.strerror}",
            where=str(error.filename or target),
            remedy="choose a writable folder, on a disk with free space",
        ) from error
    return name


def project_name(target: Path) -> str:
    """The folder's name, with ``-`` in place of characters that ``run.name`` does not allow."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", target.resolve().name).lstrip(".-")[:128] or "project"


def _fill(folder: Path, template: Traversable, name: str) -> None:
    from drawbar.config.io.explain import schema_json, schema_text

    folder.mkdir()
    for source, path in _files(template, folder):
        path.parent.mkdir(exist_ok=True)
        path.write_text(source.read_text("utf-8").replace("{{name}}", name), encoding="utf-8")
    (folder / SCHEMA).write_text(schema_text(schema_json()), encoding="utf-8")
    (folder / ".gitignore").write_text(GITIGNORE, encoding="utf-8")


def _files(template: Traversable, folder: Path) -> Iterator[tuple[Traversable, Path]]:
    """Every file of a template, with its destination in ``folder``."""
    for entry in template.iterdir():
        path = folder / entry.name.removesuffix(SUFFIX)
        if entry.is_dir():
            yield from _files(entry, path)
        else:
            yield entry, path
