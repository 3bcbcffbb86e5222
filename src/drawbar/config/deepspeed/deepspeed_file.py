"""A user's DeepSpeed JSON: read strictly, older spellings translated, and other keys refused or left out."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drawbar.config.deepspeed.deepspeed_keys import (
    CHANGES_LOSSES,
    FLAG,
    IGNORED,
    LEGACY_FLAGS,
    LEGACY_OFFLOAD,
    LIST,
    LOGGERS,
    NUMBER,
    PIN_MEMORY,
    REFUSED,
    RENAMED,
    SECTION,
    SECTIONS,
    TEXT,
    TOP,
    ZERO_SECTION,
)
from drawbar.config.io.source import Origin, Settings, read_text
from drawbar.config.schema.section import expand_path
from drawbar.errors import UserError, nearest

AUTO = "auto"
_TYPES: dict[str, tuple[type, ...]] = {
    NUMBER: (int, float),
    FLAG: (bool,),
    TEXT: (str,),
    SECTION: (dict,),
    LIST: (list,),
}


@dataclass
class DeepSpeedFile:
    """A DeepSpeed JSON: its values under DeepSpeed's current key names, and the warnings and errors about it."""

    path: str
    values: dict[str, Any]
    """Without nulls, and without the keys that are ignored, unknown to DeepSpeed or refused."""
    notes: list[str] = field(default_factory=list)
    """Warnings, a sentence each."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Each with its remedy."""

    def at(self, key: str) -> Any:
        """The value at a dotted key; None where it is not there, or is ``"auto"``."""
        value: Any = self.values
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return None if value == AUTO else value

    def note(self, key: str, text: str) -> None:
        self.notes.append(f"{self.path}: {key}: {text}")

    def refuse(self, key: str, value: Any, reason: str, remedy: str) -> None:
        self.problems.append((f"{self.path}: {key} = {json.dumps(value)}: {reason}", remedy))


def read_json(path: str) -> DeepSpeedFile:
    """The file, checked as far as it can be without the run's configuration.

    Raises:
        UserError: it cannot be read, or is not JSON. All else that is wrong with it is in ``problems``.
    """
    file = DeepSpeedFile(path, _parse(Path(path)))
    _drop_nulls(file.values)
    _translate(file)
    _check_keys(file, "", TOP)
    for section, known in SECTIONS.items():
        _check_keys(file, section, known)
    _check_offload(file)
    for key, meaning in CHANGES_LOSSES.items():
        if not _is_switched_off(file.at(key)) and not _is_fp32(file.at(key)):
            file.note(key, f"{meaning}; the losses are not those of other strategies")
    for key, meaning in LOGGERS.items():
        if not _is_switched_off(file.at(key)):
            file.note(key, f"DeepSpeed writes only values of its own; {meaning}")
    return file


def _parse(path: Path) -> dict[str, Any]:
    text = read_text(path, "JSON")
    try:
        values = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: not valid JSON: {error.msg}: {_line(text, error.lineno)}",
            remedy="no comments, no comma behind the last entry, and names in double quotes",
        ) from error
    except _Duplicate as error:
        lines = [str(number) for number, line in enumerate(text.splitlines(), 1) if f'"{error}"' in line]
        raise UserError(
            f"{path}:{lines[-1]}: not valid JSON: {error} is twice in one object (lines with that name: "
            f"{', '.join(lines)})",
            remedy="keep one of them",
        ) from error
    except (RecursionError, _NotJson) as error:
        what = str(error) if isinstance(error, _NotJson) else "it is nested too deeply"
        raise UserError(f"not valid JSON: {what}", where=str(path), remedy="write a plain number") from error
    if not isinstance(values, dict):
        raise UserError(
            "the file holds no JSON object at its top level",
            where=str(path),
            remedy='write `{"zero_optimization": {"stage": 2}}`',
        )
    return values


class _Duplicate(Exception):
    """A name that an object has twice."""


class _NotJson(Exception):
    """NaN or an infinity, which Python's parser accepts although JSON has no such number."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Duplicate(name)
        found[name] = value
    return found


def _constant(name: str) -> Any:
    raise _NotJson(f"{name} is no number")


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number - 1].strip() if number <= len(lines) else "(end of file)"


def _drop_nulls(values: dict[str, Any]) -> None:
    for name in [name for name, value in values.items() if value is None]:
        del values[name]
    for value in values.values():
        if isinstance(value, dict):
            _drop_nulls(value)


def _translate(file: DeepSpeedFile) -> None:
    """Older spellings to those of today."""
    values = file.values
    _rename(file, values, "", "bfloat16", "bf16")
    if values.pop("fp32_allreduce", None) is True:
        file.note("fp32_allreduce", 'read as "communication_data_type": "fp32"')
        values.setdefault("communication_data_type", "fp32")
    zero = values.get(ZERO_SECTION)
    if isinstance(zero, bool):
        values[ZERO_SECTION] = {"stage": int(zero)}
        file.note(ZERO_SECTION, f'read as {{"stage": {int(zero)}}}')
    if not isinstance(zero, dict):
        return
    for old, new in RENAMED.items():
        _rename(file, zero, f"{ZERO_SECTION}.", old, new)
    _translate_offload(file, zero)


def _rename(file: DeepSpeedFile, section: dict[str, Any], prefix: str, old: str, new: str) -> None:
    if old not in section:
        return
    value = section.pop(old)
    if section.setdefault(new, value) != value:
        file.refuse(f"{prefix}{old}", value, f"{prefix}{new} = {json.dumps(section[new])} says it too", "keep one")
    else:
        file.note(f"{prefix}{old}", f"read as {new}")


def _translate_offload(file: DeepSpeedFile, zero: dict[str, Any]) -> None:
    flags = {name: zero.pop(name) for name in LEGACY_FLAGS if name in zero}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            file.refuse(f"{ZERO_SECTION}.{name}", flag, "expected true or false", "write true or false")
    for old, new in LEGACY_OFFLOAD.items():
        if flags.get(old) is not True:
            continue
        place = zero.setdefault(new, {"device": "cpu"})
        if isinstance(place, dict) and place.get("device", "none") == "cpu":
            file.note(f"{ZERO_SECTION}.{old}", f'read as "{new}": {{"device": "cpu"}}')
        else:
            key = f"{ZERO_SECTION}.{new} = {json.dumps(place)}"
            file.refuse(f"{ZERO_SECTION}.{old}", True, f"{key} says where, too", "keep one")
    if PIN_MEMORY in flags:
        for new in set(LEGACY_OFFLOAD.values()):
            if isinstance(zero.get(new), dict):
                zero[new].setdefault("pin_memory", flags[PIN_MEMORY])
        file.note(f"{ZERO_SECTION}.{PIN_MEMORY}", "read as pin_memory in offload_optimizer and offload_param")


def _check_keys(file: DeepSpeedFile, section: str, known: Mapping[str, str | None]) -> None:
    """Take out of one section what does not belong there."""
    values = file.at(section) if section else file.values
    if not isinstance(values, dict):
        return  # absent, or reported as an entry of the section above
    for name, value in list(values.items()):
        key = f"{section}.{name}" if section else name
        if key in IGNORED:
            file.note(key, f"without effect here: {IGNORED[key]}")
        elif key in REFUSED:
            if not _is_switched_off(value):
                reason, remedy = REFUSED[key]
                file.refuse(key, value, reason, f"remove it from the file{'; ' if remedy else ''}{remedy}")
        elif name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            file.note(key, f"unknown to DeepSpeed, and left out{hint}")
        elif _fits(value, known[name]):
            continue
        else:
            file.refuse(key, value, f"expected {known[name]}", 'correct it, or write "auto"')
        del values[name]


def _check_offload(file: DeepSpeedFile) -> None:
    for name in ("offload_optimizer", "offload_param"):
        key = f"{ZERO_SECTION}.{name}"
        device, folder = file.at(f"{key}.device"), file.at(f"{key}.nvme_path")
        if device not in (None, "none", "cpu", "nvme"):
            file.refuse(f"{key}.device", device, "expected none, cpu or nvme", "write one of them")
        elif device == "nvme" and folder is None:
            file.refuse(
                f"{key}.device", device, "nvme_path is missing", f"write {name}.nvme_path, a folder of that disk"
            )
    stage, place = file.at(f"{ZERO_SECTION}.stage") or 0, file.at(f"{ZERO_SECTION}.offload_param")
    if isinstance(stage, int) and stage < 3 and offload_target(place) not in (None, "none"):
        is_open = file.values[ZERO_SECTION].get("stage") == AUTO
        if not is_open:
            key = f"{ZERO_SECTION}.offload_param"
            reason = f"stage {stage} keeps parameters on the device, and DeepSpeed does not read this section"
            file.refuse(key, place, reason, "remove it, or set the stage to 3 in the file")


def _fits(value: Any, kind: str | None) -> bool:
    if value == AUTO or kind is None:
        return True
    return isinstance(value, _TYPES[kind]) and (kind == FLAG or not isinstance(value, bool))


def _is_switched_off(value: Any) -> bool:
    """Whether a setting is there only to say that it is off."""
    if isinstance(value, dict):
        if "enabled" in value:
            return value["enabled"] in (False, AUTO)
        return all(_is_switched_off(inner) for inner in value.values())
    return value is not True and value in (None, False, 0, 1, -1, AUTO)  # a size of 1, or -1: nothing is split


def _is_fp32(value: Any) -> bool:
    """Whether a dtype (or each of a mapping) is left open or fp32, the other strategies' default for sums."""
    return all(map(_is_fp32, value.values())) if isinstance(value, dict) else value in ("fp32", AUTO, None)


def without_auto(values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """The values but for those that are ``"auto"``, and the keys of these."""
    kept: dict[str, Any] = {}
    automatic: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict):
            kept[name], inner = without_auto(value, f"{prefix}{name}.")
            automatic += inner
        elif value == AUTO:
            automatic.append(f"{prefix}{name}")
        else:
            kept[name] = value
    return kept, automatic


def fill_from_deepspeed_json(settings: Settings) -> None:
    """Settings that are null, auto or absent get the values that the file named by ``deepspeed.config`` gives them.

    Where there is no such file nothing is set, so that a run copied elsewhere can be read; training needs the file.

    Raises:
        UserError: the file is not JSON.
    """
    section, parallel = _mapping(settings, "deepspeed"), _mapping(settings, "parallel")
    path, strategy = section.get("config"), parallel.get("strategy", AUTO)
    if not isinstance(path, str) or section.get("preset") is not None or strategy not in (AUTO, "deepspeed"):
        return
    try:
        path = expand_path(path)
    except ValueError:
        return  # the check of deepspeed.config reports this
    if not Path(path).is_file():
        return
    for setting, value, place in settings_in_json(read_json(path)):
        name, _, key = setting.partition(".")
        holder = settings.values.setdefault(name, {}) if key else settings.values
        key = key or name
        is_open = isinstance(holder, dict) and holder.get(key) in (None, AUTO)
        if is_open and not _is_decided_by_another_setting(setting, settings):
            holder[key] = value
            settings.origins[setting] = Origin(f"{path}: {place}")


def _mapping(settings: Settings, name: str) -> dict[str, Any]:
    found = settings.values.get(name)
    return found if isinstance(found, dict) else {}


def _is_decided_by_another_setting(setting: str, settings: Settings) -> bool:
    if setting == "train.micro_batch":
        return _mapping(settings, "train").get("micro_batch_tokens") is not None
    parallel = _mapping(settings, "parallel")
    if setting == "deepspeed.offload_parameters" and parallel.get("zero_stage") not in (None, 3):
        return True
    return setting.startswith("deepspeed.offload") and bool(parallel.get("offload"))


def settings_in_json(file: DeepSpeedFile) -> Iterator[tuple[str, Any, str]]:
    """Each drawbar setting that a DeepSpeed JSON gives: the setting, its value, and the key in the JSON."""
    if file.problems:
        return
    stage = 0 if ZERO_SECTION not in file.values else file.at(f"{ZERO_SECTION}.stage")
    if isinstance(file.at(ZERO_SECTION), dict) and "stage" not in file.values[ZERO_SECTION]:
        stage = 0  # as DeepSpeed reads it
    if stage is not None:
        yield "parallel.zero_stage", stage, f"{ZERO_SECTION}.stage"
    for setting, name in (("offload_optimizer", "offload_optimizer"), ("offload_parameters", "offload_param")):
        place = offload_target(file.at(f"{ZERO_SECTION}.{name}"))
        if place not in (None, "none") and (name == "offload_optimizer" or stage in (3, None)):
            yield f"deepspeed.{setting}", place, f"{ZERO_SECTION}.{name}"
    formats = {name: file.at(f"{name}.enabled") for name in ("bf16", "fp16")}
    for name, enabled in formats.items():
        if enabled is True:
            yield "precision", name, f"{name}.enabled"
    if list(formats.values()) == [False, False]:
        yield "precision", "fp32", "bf16.enabled and fp16.enabled"
    if (rows := file.at("train_micro_batch_size_per_gpu")) is not None:
        yield "train.micro_batch", rows, "train_micro_batch_size_per_gpu"


def offload_target(offload: Any) -> str | None:
    """An ``offload_…`` section as drawbar says it: ``none``, ``cpu`` or a folder; None where it does not say."""
    if not isinstance(offload, dict):
        return None
    device = offload.get("device", "none")
    return None if device == AUTO else str(offload.get("nvme_path", "nvme")) if device == "nvme" else str(device)
