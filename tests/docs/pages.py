"""What the tests of the pages share: their blocks, and every command run in its order and spelling.

The word after a block's language, which a reader does not see, says what becomes of it:

- none: a configuration or a script that begins with its own name is written to that file; commands are run;
- ``part``: some settings of a configuration, which are loaded, and of which the data are opened;
- ``hub``: needs the Hugging Face Hub, or another machine: its settings are loaded, its commands are not run;
- ``fails``: commands that end with exit code 2;
- ``output``: all of its lines are printed by the commands of the block before it.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from harness import Finished, run_cli, run_deepspeed, run_script, run_torchrun

BLOCK = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    mark: str
    text: str


def blocks(page: Path) -> list[Block]:
    assert "```output" not in page.read_text(encoding="utf-8"), "nobody compares it: write ```text output"
    return [Block(language, mark, text) for language, mark, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def write_files(page: Path, folder: Path) -> None:
    """The configurations and scripts of a page, under the names that they begin with."""
    for block in blocks(page):
        if block.language in ("yaml", "python") and not block.mark:
            name = re.match(r"# (\S+)\n", block.text)
            assert name is not None, f"a block without a file name: {block.text[:60]}"
            (folder / name.group(1)).write_text(block.text, encoding="utf-8")


def run_commands(page: Path, folder: Path) -> int:
    """Run a page's commands, and compare what it shows of their output; returns how many commands there were."""
    count, printed = 0, ""
    for block in blocks(page):
        if block.language == "bash" and block.mark != "hub":
            printed = ""
            for command in filter(str.strip, block.text.splitlines()):
                words = shlex.split(command, comments=True)
                if words[0] == "cd":
                    folder = (folder / words[1]).resolve()
                    continue
                done = run_command(words, folder)
                assert done.code == (2 if block.mark == "fails" else 0), f"{command}\n{done.out}\n{done.err}"
                printed += done.out + done.err
                count += 1
        elif block.mark == "output":
            missing = [line for line in block.text.splitlines() if line.rstrip() not in printed]
            assert not missing, f"{page.name} shows {missing[0]!r}, which is not in\n{printed}"
    return count


def run_command(words: list[str], folder: Path, env: dict[str, str] | None = None) -> Finished:
    match words[0]:
        case "drawbar":
            return run_cli(*words[1:], cwd=folder, env=env)
        case "python":
            return run_script(folder / words[1], *words[2:], cwd=folder, env=env)
        case "torchrun":
            return run_torchrun(*words[1:], cwd=folder, env=env)
        case "deepspeed":
            return run_deepspeed(*words[1:], cwd=folder, env=env)
    raise AssertionError(f"a page runs drawbar, python, torchrun or deepspeed, not {words[0]}")


def column(text: str, heading: str, number: int = 0) -> list[str]:
    """The cells of a column of the table whose first heading is ``heading``."""
    table = text.split(f"\n| {heading} |", maxsplit=1)[1].split("\n\n", maxsplit=1)[0]
    return [line.strip("| ").split(" | ")[number] for line in table.splitlines()[2:]]


def unknown_settings(page: Path) -> list[str]:
    """What a page names in backticks as ``section.key``, and is no setting. Not looked at: files, what is called as in
    ``run.log(…)``, and the first cells of tables, which are about other programs."""
    reference = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    settings = set(re.findall(r"^\| `(\w+(?:\.\w+)*)` \|", reference, re.MULTILINE))
    sections = {setting.partition(".")[0] for setting in settings if "." in setting}
    text = re.sub(r"^\| .*? \| ", "", BLOCK.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    named = re.findall(r"(?<![\w./@])([a-z_]+(?:\.[a-z_]+)+)(?=[=:`, ])", " ".join(re.findall(r"`[^`\n]+`", text)))
    files = (".py", ".json", ".jsonl", ".yaml", ".txt", ".tsv")
    found = {name for name in named if name.partition(".")[0] in sections and not name.endswith(files)}
    return sorted(found - settings)
