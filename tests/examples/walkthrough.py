"""What the tests of the examples share: every command of a README, run in its order and spelling, on a small slice.

The slice is made-up data, and each test names the sizes that it makes smaller; the rest of a configuration is the
example's own.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from harness import Finished, run_cli, run_script, run_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(example: str, language: str = "bash") -> list[str]:
    """The commands of an example's README, in its order."""
    page = (EXAMPLES / example / "README.md").read_text(encoding="utf-8")
    texts = [text for kind, text in BLOCK.findall(page) if kind == language]
    return [line for text in texts for line in text.splitlines() if line.strip()]


def copy_example(example: str, folder: Path, **changes: dict[str, Any]) -> None:
    """The example's files in ``folder``, with settings of its YAML files (``config``: ``config.yaml``) changed."""
    shutil.copytree(EXAMPLES / example, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    yaml = YAML()
    for name, settings in changes.items():
        path = folder / f"{name}.yaml"
        config = yaml.load(path)
        for key, value in settings.items():
            *sections, last = key.split(".")
            section = config
            for part in sections:
                section = section[part]
            assert last in section, f"{path.name} has no {key} to be made smaller"
            section[last] = value
        yaml.dump(config, path)


def walk(
    example: str, folder: Path, env: dict[str, str] | None = None, smaller: tuple[str, str] = ("", "")
) -> dict[str, Finished]:
    """Run every command of the README in ``folder``, with one setting replaced by a ``smaller`` one; what each
    printed."""
    outputs = {}
    for command in commands(example):
        done = _run(shlex.split(command.replace(*smaller), comments=True), folder, env or {})
        assert done.code == 0, f"{command}\n{done.out}\n{done.err}"
        outputs[command] = done
    return outputs


def _run(words: list[str], folder: Path, env: dict[str, str]) -> Finished:
    match words[0]:
        case "drawbar":
            return run_cli(*words[1:], cwd=folder, env=env)
        case "python":
            return run_script(folder / words[1], *words[2:], cwd=folder)
        case "torchrun":
            return run_torchrun(*words[1:], cwd=folder, env=env)
    raise AssertionError(f"an example runs drawbar, python or torchrun, not {words[0]}")


def write_sentiments(folder: Path) -> None:
    """``train.tsv``, ``dev.tsv`` and ``test.tsv`` as those of SST-2: a sentence, a tab, 0 or 1; no header."""
    things = ["film", "plot", "cast", "score", "ending", "dialogue", "camera", "pace"]
    words = {0: ["dull", "flat", "weak", "tired", "clumsy"], 1: ["bright", "moving", "witty", "warm", "sharp"]}
    for seed, (name, count) in enumerate({"train": 160, "dev": 24, "test": 24}.items()):
        chance = np.random.default_rng(seed)
        lines = []
        for number in range(count):
            label = number % 2
            parts = [
                f"the {chance.choice(things)} is {chance.choice(words[label])}" for _ in range(chance.integers(1, 4))
            ]
            lines.append(f"{' and '.join(parts)} .\t{label}\n")
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
