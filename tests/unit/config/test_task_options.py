"""Options of a user's own task: what config.yaml holds is read back, what it cannot hold is refused with its name."""

import math
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ConfigDict, ValidationError, computed_field, field_serializer, field_validator

from drawbar.config.io.explain import explain, schema_json
from drawbar.config.io.load_config import dump_yaml, load_config
from drawbar.config.schema.run_config import RunConfig
from drawbar.config.schema.task_sections import CausalLMConfig, TaskConfig
from drawbar.errors import UserError


class Pooling(Enum):
    MEAN = "mean"
    FIRST = "first"


class Stored(CausalLMConfig):
    """Every kind of option that config.yaml gives back."""

    pooling: Pooling = Pooling.MEAN
    folder: Path = Path("here")
    sizes: tuple[int, ...] = (1, 2)
    words: frozenset[str] = frozenset({"a", "b"})
    since: date = date(2024, 1, 31)
    by_name: dict[str, list[float]] = {"x": [0.5]}
    share: float = 1


class NamedType(TaskConfig):
    """A torch dtype that is stored under its name."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    dtype: torch.dtype = torch.float32

    @field_validator("dtype", mode="before")
    @classmethod
    def _of_name(cls, value: Any) -> Any:
        return getattr(torch, value, value) if isinstance(value, str) else value

    @field_serializer("dtype")
    def _name(self, value: torch.dtype) -> str:
        return str(value).removeprefix("torch.")


@pytest.mark.parametrize(
    ("task", "overrides"),
    [
        (Stored, []),
        (Stored, ["task.pooling=first", "task.folder=x/y", "task.words=[c]", "task.since=2025-02-01"]),
        (NamedType, []),
        (NamedType, ["task.dtype=bfloat16"]),
    ],
)
def test_options_are_read_back_as_they_were(task: type[TaskConfig], overrides: list[str], tmp_path: Path) -> None:
    config = load_config(None, overrides, task).config
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "config.yaml", task=task).config.task == config.task


def test_an_option_of_any_type_is_explained() -> None:
    loaded = load_config(None, ["task.dtype=bfloat16"], NamedType)
    text = explain("task.dtype", loaded)
    assert 'task.dtype = "torch.bfloat16"' in text
    assert 'default:  "torch.float32"' in text
    assert "dtype" in str(schema_json(NamedType))


def test_a_wrong_option_beside_one_of_any_type() -> None:
    with pytest.raises(UserError, match=r"task.dtyp=float32: unknown key; did you mean task.dtype\?"):
        load_config(None, ["task.dtyp=float32"], NamedType)


class TorchType(TaskConfig):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    dtype: torch.dtype = torch.float32


class AnyValue(TaskConfig):
    folder: Any = Path("x")


class Infinite(TaskConfig):
    longest: float = math.inf


class NoneForText(TaskConfig):
    column: str = None  # type: ignore[assignment]


class ListForTuple(TaskConfig):
    sizes: list[int] = (1, 2)  # type: ignore[assignment]


class Computed(TaskConfig):
    size: int = 2

    @computed_field  # type: ignore[prop-decorator]
    @property
    def doubled(self) -> int:
        return 2 * self.size


class Tensor(TaskConfig):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    weights: Any = torch.ones(2)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (TorchType, "the option dtype is torch.float32, of type dtype, which the run's config.yaml cannot store"),
        (
            AnyValue,
            "the option folder is PosixPath('x'), which is written to the run's config.yaml and is read back as",
        ),
        (Infinite, "the option longest is inf, which is written to the run's config.yaml and is refused"),
        (NoneForText, "the option column is None, which is written to the run's config.yaml and is refused"),
        (
            ListForTuple,
            "the option sizes is (1, 2), which is written to the run's config.yaml and is read back as [1, 2]",
        ),
        (Computed, "the option doubled is written to the run's config.yaml and is refused when it is read"),
        (Tensor, "the option weights is tensor([1., 1.]), of type Tensor, which the run's config.yaml cannot store"),
    ],
)
def test_an_option_that_cannot_be_stored_is_refused(task: type[TaskConfig], says: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(None, [], task)
    assert says in error.value.what
    assert "task: " in error.value.what
    with pytest.raises(ValidationError) as refused:  # as for any wrong value in Python
        RunConfig(task=task())
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "task.labels=[a, b]",
            "the task has no such option, which sequence_classification or token_classification has",
        ),
        ("task.target_length=8", "the task has no such option, which seq2seq has"),
        ("task.mask_share=0.2", "the task has no such option, which masked_lm has"),
    ],
)
def test_an_option_of_another_task(setting: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(None, [setting])
    assert f"command line: {setting}: unknown key: {says}" in error.value.what
    assert "set task.type" in error.value.what


def test_an_option_that_a_task_of_ones_own_lacks() -> None:
    class Mine(TaskConfig):
        text_columns: str = "text"

    with pytest.raises(UserError) as error:
        load_config(None, ["task.text_column=body"], Mine)
    assert "which causal_lm or sequence_classification or masked_lm has; did you mean task.text_columns?" in str(
        error.value
    )


def test_names_where_each_needs_a_section() -> None:
    class Mine(TaskConfig):
        heads: dict[str, dict[str, int]] = {}
        names: dict[str, str] = {}

    for setting, hint in (
        ("task.heads=[a, b]", "; each name has a section of options: task.heads={a: {}, b: {}}"),
        ("task.heads=3", "; each name has a section of options: task.heads={NAME: {}}"),
        ("task.names=[a, b]", ""),
    ):
        with pytest.raises(UserError) as error:
            load_config(None, [setting], Mine)
        assert error.value.what.partition("got ")[2].partition(";")[0] in ('["a", "b"]', "3")
        assert error.value.what.endswith(hint or '"b"]')


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "dtype: torch.dtype | None = None",
            "Mine.Config.dtype has a type that cannot be read from YAML: <class 'torch",
        ),
        ("width = 16", "Mine.Config.width has no type, so it is not an option: write `width: TYPE"),
        ("import math", "Mine.Config.math has no type, so it is not an option"),
    ],
)
def test_an_option_that_pydantic_cannot_read_is_named_in_one_line(
    body: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"unreadable_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        f"import torch, drawbar\n\n\nclass Mine(drawbar.Task):\n    class Config(drawbar.TaskConfig):\n        {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as caught:
        load_config(None, [f"task.type={name}:Mine"])
    assert says in caught.value.what
    assert f"({tmp_path / name}.py:5)" in caught.value.what
    assert len(caught.value.what.splitlines()) == 1
