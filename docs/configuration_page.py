"""The page docs/configuration.md: every setting with its meaning, and every rule, as the program has them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from drawbar.config.io.compare import MAY_CHANGE
from drawbar.config.io.fields import REQUIRED, Setting, catalogue, children, show
from drawbar.config.io.other_names import OUR_NAMES
from drawbar.config.rules.rule import Rule
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES
from drawbar.config.schema.run_config import run_config_type
from drawbar.config.schema.task_sections import BUILT_IN_TASKS, CausalLMConfig, TaskConfig

_INTRODUCTION = """\
# Configuration

<!-- Generated from the schema by `make docs`. Do not edit. -->

A run is described by a YAML file and `key=value` arguments that override it. `drawbar config show` prints the result
with every default written out; `drawbar config explain KEY` says what a key means and where its value comes from.
If two settings express the same thing in different ways (`train.steps` and `train.epochs`), the one on the command line
replaces the one in the file, and a message says so; both in one place are refused. Unknown keys are errors.
`~`, `$NAME` and `${NAME}` are expanded in paths. Values are YAML 1.2: `3e-4` is a number, and `yes` is text.
"""

_OTHERS = """\
Names in transformers' `TrainingArguments` and example scripts, Lightning's `Trainer` and axolotl, and their
counterparts here. If you use one of them as a setting, the error names drawbar's. `global_batch` is the batch of one
optimizer step: gradients are accumulated as often as micro-batch and number of processes require."""

_RESUMING = """\
Running a command again resumes its run. Only the differences from its `config.yaml` that are listed below are accepted.
Raise the steps or epochs and the run continues, even a complete one: the schedule is recomputed for the steps to come,
which the log says; the steps already made stay as they are. Fewer steps than were made are refused."""


def render() -> str:
    """The whole page, in Markdown."""
    known = catalogue(run_config_type(CausalLMConfig))
    sections = [setting for key, setting in known.items() if "." not in key and children(known, key)]
    top = [setting for key, setting in known.items() if "." not in key and setting not in sections]
    lines = [_INTRODUCTION, "## Top level", "", *_table(top)]
    for section in sections:
        lines += ["", f"## `{section.key}`", "", section.meaning, ""]
        lines += _table([setting for key, setting in known.items() if key.startswith(f"{section.key}.")])
        if section.key == "task":
            lines += _other_tasks(CausalLMConfig)
    lines += ["", "## Which settings combine", "", "Every command refuses:", "", *_rule_table(RULES)]
    lines += ["", "Training refuses besides:", "", *_rule_table(TRAIN_RULES)]
    lines += ["", "## What may change when a run is resumed", "", _RESUMING, ""]
    lines += ["| Setting | Why |", "| --- | --- |", *(f"| `{key}` | {why} |" for key, why in MAY_CHANGE.items())]
    lines += ["", "## What other trainers call it", "", _OTHERS, ""]
    lines += ["| There | Here |", "| --- | --- |"]
    lines += [f"| `{name}` | {', '.join(f'`{ours}`' for ours in found)} |" for name, found in OUR_NAMES.items()]
    return "\n".join(lines) + "\n"


def _other_tasks(shown: type[TaskConfig]) -> Iterator[str]:
    """A table for each built-in task, of the options that ``shown`` does not have."""
    for name, task in BUILT_IN_TASKS.items():
        if task is not shown:
            own = [
                replace(setting, key=f"task.{key}")
                for key, setting in catalogue(task).items()
                if key not in catalogue(shown)
            ]
            yield from ["", f"### With `task.type: {name}`, besides", "", *_table(own)]


def _table(settings: Sequence[Setting]) -> Iterator[str]:
    yield "| Key | Allowed | Default | Meaning |"
    yield "| --- | --- | --- | --- |"
    for setting in settings:
        default = setting.default if setting.default == REQUIRED else f"`{show(setting.default)}`"
        yield f"| `{setting.key}` | `{_cell(setting.allowed)}` | {_cell(default)} | {_cell(setting.meaning)} |"


def _rule_table(rules: Sequence[Rule]) -> Iterator[str]:
    yield "| Rule | Settings | Reason | What to do |"
    yield "| --- | --- | --- | --- |"
    for rule in rules:
        keys = ", ".join(f"`{key}`" for key in rule.keys)
        yield f"| {rule.name} | {keys} | {_cell(rule.reason)} | {_cell(rule.remedy)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
