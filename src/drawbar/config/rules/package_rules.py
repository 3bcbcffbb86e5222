"""Packages of drawbar's extras, and the settings that need them. What is missing is said before torch is imported; who
imports them says it again, of one that is there and cannot be imported."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from drawbar.config.rules.rule import Rule
from drawbar.config.schema.run_config import RunConfig


class _Extra(NamedTuple):
    name: str
    package: str
    setting: str
    is_used: Callable[[RunConfig], bool]


def _tracker(name: str) -> _Extra:
    return _Extra(name, name, "tracking.trackers", lambda config: config.tracking.trackers.get(name) is not None)


_EXTRAS = (
    _Extra("lora", "peft", "lora", lambda config: config.lora is not None),
    _Extra("fp8", "torchao", "parallel.fp8", lambda config: config.parallel.fp8 is not None),
    _Extra("liger", "liger_kernel", "task.cross_entropy", lambda config: _cross_entropy(config) == "liger"),
    _Extra("deepspeed", "deepspeed", "parallel.strategy", lambda config: config.parallel.strategy == "deepspeed"),
    _Extra("object-store", "s3fs", "checkpoint.remote", lambda config: (config.checkpoint.remote or "")[:5] == "s3://"),
    *map(_tracker, ("wandb", "mlflow", "trackio")),
)


def _cross_entropy(config: RunConfig) -> str | None:
    return getattr(config.task, "cross_entropy", None)


def _rule(extra: _Extra) -> Rule:
    # DeepSpeed's build asks torch, which must be there
    how = "DS_BUILD_OPS=0 pip install --no-build-isolation" if extra.name == "deepspeed" else "pip install"
    return Rule(
        name=f"{extra.setting} without {extra.package}",
        keys=(extra.setting,),
        broken=lambda config: extra.is_used(config) and find_spec(extra.package) is None,
        reason=f"it needs the package {extra.package}, which is not installed",
        remedy=f"{how} 'drawbar[{extra.name}]', or leave {extra.setting} out",
    )


PACKAGE_RULES = tuple(map(_rule, _EXTRAS))
"""For this machine: another one, to which a job is submitted, may have other packages."""
