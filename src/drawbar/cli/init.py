"""``drawbar init``: a small project that trains at once, from one of the folders in ``drawbar/templates``."""

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
    "instruction_tuning": "answers to prompts; the loss is that of the answers alone",
    "custom_task": "your own model, loss and scores in task.py",
}
"""The folders of ``drawbar/templates``, and what each is for."""

SUFFIX = "-tpl"
"""The end of a template's file name where tools would take the file for a part of drawbar: ``task.py-tpl``."""

SCHEMA = "config.schema.json"
"""The JSON schema of ``config.yaml``, which its first line names: editors check and complete it, without a network."""

GITIGNORE = "runs/\n__pycache__/\n.pytest_cache/\n"

_LISTED = "\n".join(f"  {name:<20}{meaning}" for name, meaning in TEMPLATES.items())


@click.command(
    short_help="Write a small project that trains at once.",
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
    help="What kind of project; they are listed below.",
)
def init(folder: str, template: str) -> int:
    """Write a small project to DIR (a new or empty folder): settings, data, a test. It trains at once."""
    target = Path(folder)
    name = write_project(target, template)
    click.echo(f"{target}: the project {name}, from the template {template}\n\nNext:")
    if target.resolve() != Path.cwd():
        click.echo(f"  cd {shlex.quote(str(target))}")
    click.echo(f"  drawbar train config.yaml\n  drawbar eval runs/{name}\n\nREADME.md says what to change first.")
    return ExitCode.DONE


def write_project(target: Path, template: str) -> str:
    """Fill ``target`` with a template's files; all of them, or none.

    Args:
        target: a folder that does not exist or is empty.
        template: one of ``TEMPLATES``.

    Returns:
        The project's name: the folder's, as far as a run can be called so.

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
            for path in project.iterdir() if project.exists() else ():  # an empty folder may be the current one
                path.rename(target / path.name)
    except OSError as error:
        raise UserError(
            f"the project cannot be written: {error.strerror}",
            where=str(error.filename or target),
            remedy="choose a folder that you may write to, on a disk with room",
        ) from error
    return name


def project_name(target: Path) -> str:
    """The folder's name, with ``-`` for what the name of a run cannot hold (see ``run.name``)."""
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
    """Every file of a template, and where it belongs in ``folder``."""
    for entry in template.iterdir():
        path = folder / entry.name.removesuffix(SUFFIX)
        if entry.is_dir():
            yield from _files(entry, path)
        else:
            yield entry, path
