"""The configuration explained: one setting to a user at the terminal, all of them as a page of the documentation."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from drawbar.config.io.compare import MAY_CHANGE
from drawbar.config.io.fields import (
    REQUIRED,
    Setting,
    TolerantJsonSchema,
    catalogue,
    children,
    lookup,
    show,
    suggestions,
)
from drawbar.config.io.load_config import LoadedConfig
from drawbar.config.io.other_names import OUR_NAMES
from drawbar.config.io.source import ancestors
from drawbar.config.rules.rule import Rule
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES
from drawbar.config.schema.run_config import run_config_type
from drawbar.config.schema.task_sections import BUILT_IN_TASKS, CausalLMConfig, TaskConfig
from drawbar.errors import UserError


def explain(key: str, loaded: LoadedConfig) -> str:
    """Value, origin, type, default and meaning of one setting; of a section, its settings with a line each.

    Raises:
        UserError: there is no such key.
    """
    known = catalogue(type(loaded.config))
    if key not in known:
        return _explain_free(key, loaded, known)
    setting = known[key]
    if setting.is_section:
        return _explain_section(setting, loaded, known)
    lines = [f"{key} = {_value(key, loaded)}", *_facts(setting, loaded)]
    inside = children(known, key)
    if inside:
        lines += ["", "Its keys:", *_listing(inside, loaded)]
    return "\n".join(lines)


def schema_json(task: type[TaskConfig] | None = None) -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors.

    Args:
        task: the options under ``task:``; None for those of whichever built-in task ``task.type`` names, and any
            options of a user's own task.
    """
    schema = run_config_type(task or CausalLMConfig).model_json_schema(schema_generator=TolerantJsonSchema)
    if task is None:
        for options in BUILT_IN_TASKS.values():
            own = options.model_json_schema(schema_generator=TolerantJsonSchema)
            schema["$defs"] |= own.pop("$defs", {}) | {options.__name__: own}
        schema["properties"]["task"] = _schema_by_type()
    return schema


def _schema_by_type() -> dict[str, Any]:
    """The JSON schema of the section ``task``: its options are those of the task that ``type`` names."""
    words = {"anyOf": [{"enum": list(BUILT_IN_TASKS)}, {"type": "string"}]}
    meaning = TaskConfig.model_fields["type"].description
    by_type = [
        {
            "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
            "then": {"$ref": f"#/$defs/{options.__name__}"},
        }
        for name, options in BUILT_IN_TASKS.items()
    ]
    # without a type it is causal_lm, or the task of the script that reads the file, whose options may be any
    untyped = {"if": {"not": {"required": ["type"]}}, "then": {"anyOf": [{"$ref": "#/$defs/CausalLMConfig"}, {}]}}
    properties = {"type": {**words, "description": meaning}}
    return {"type": "object", "properties": properties, "allOf": [*by_type, untyped]}


def schema_text(schema: dict[str, Any]) -> str:
    """A JSON schema as a file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def markdown_reference() -> str:
    """The page ``docs/configuration.md``, generated so that it cannot disagree with the program."""
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


_INTRODUCTION = """\
# Configuration

<!-- Generated from the schema by `make docs`. Do not edit. -->

A run is described by a YAML file and `key=value` arguments that overrule it. `drawbar config show` prints the result
with every default written out; `drawbar config explain KEY` says what a key means and where its value came from.
Where two settings say the same in different ways (`train.steps` and `train.epochs`), the one on the command line
takes the place of the one in the file, and a line says so; both in one place are refused. Unknown keys are errors.
`~`, `$NAME` and `${NAME}` are expanded in paths. Values are YAML 1.2: `3e-4` is a number, and `yes` is text.
"""

_OTHERS = """\
Names of transformers' `TrainingArguments` and example scripts, Lightning's `Trainer` and axolotl, and what they are
here. If one is given as a setting, the error names drawbar's own. `global_batch` is the whole of a step: gradients are
accumulated as often as the micro-batch and the number of processes make it necessary."""

_RESUMING = """\
Running a command again resumes its run. Only the differences below from its `config.yaml` are accepted. More steps or
epochs go on with a run, also with one that is complete: the schedule is computed anew for the steps to come, which the
log says, and the steps that were made stay as they are. Fewer steps than were made are refused."""


def _explain_section(section: Setting, loaded: LoadedConfig, known: dict[str, Setting]) -> str:
    title = f"{section.key}: {section.meaning}" if section.meaning else section.key
    return "\n".join([title, "", *_listing(children(known, section.key), loaded)])


def _explain_free(key: str, loaded: LoadedConfig, known: dict[str, Setting]) -> str:
    """A key of a mapping whose keys the schema does not know, such as ``task.from_scratch.n_layer``."""
    holder = next((known[ancestor] for ancestor in ancestors(key) if ancestor in known), None)
    if holder is None or not holder.is_mapping:
        meant = suggestions(known, key)
        section = holder.key if holder is not None and holder.is_section else ""
        listed = f"{f'in {section}' if section else 'sections'}: {', '.join(children(known, section))}"
        raise UserError(f"there is no setting {key}", remedy=f"did you mean {' or '.join(meant)}?" if meant else listed)
    return "\n".join(
        [
            f"{key} = {_value(key, loaded)}",
            f"  from:     {loaded.origin(key)}",
            f"  part of:  {holder.key}: {holder.meaning}",
        ]
    )


def _value(key: str, loaded: LoadedConfig) -> str:
    holder, _, name = key.rpartition(".")
    inside = lookup(loaded.config, holder) if holder else loaded.config
    is_set = name in (inside if isinstance(inside, dict) else getattr(type(inside), "model_fields", ()))
    return show(lookup(loaded.config, key)) if is_set else "(not set)"


def _facts(setting: Setting, loaded: LoadedConfig) -> Iterator[str]:
    yield f"  from:     {loaded.origin(setting.key)}"
    yield f"  allowed:  {setting.allowed}"
    yield f"  default:  {show(setting.default)}"
    if setting.meaning:
        yield f"  meaning:  {setting.meaning}"


def _listing(settings: dict[str, Setting], loaded: LoadedConfig) -> Iterator[str]:
    """``key = value   meaning``, aligned; a section has no value."""
    assignments = {
        setting.key: setting.key if setting.is_section else f"{setting.key} = {_value(setting.key, loaded)}"
        for setting in settings.values()
    }
    width = max(map(len, assignments.values()), default=0)
    for setting in settings.values():
        yield f"  {assignments[setting.key]:<{width}}  {setting.meaning}".rstrip()


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
