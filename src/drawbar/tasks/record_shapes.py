"""Shapes of records that are known by their columns, so that nobody need name these: chats, Alpaca."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from drawbar.config.schema.data_section import DataSection
from drawbar.config.schema.task_sections import COLUMNS_BY_SHAPE, CausalLMConfig, names_no_column
from drawbar.data.sources import open_records
from drawbar.errors import UserError
from drawbar.runtime.log import logger

ALPACA_INSTRUCTION, ALPACA_INPUT, ALPACA_OUTPUT = "instruction", "input", "output"


class Shape(NamedTuple):
    """Records of one kind."""

    name: str
    columns: dict[str, type]
    """What a record of it has, and of which type."""
    options: dict[str, str]
    """The options of ``causal_lm`` that read it."""


SHAPES = (
    Shape("chats", {"messages": list}, {"messages_column": "messages"}),
    Shape("chats, as ShareGPT has them", {"conversations": list}, {"messages_column": "conversations"}),
    Shape(
        "instructions with answers, as Alpaca has them",
        {ALPACA_INSTRUCTION: str, ALPACA_OUTPUT: str},
        {"prompt_column": ALPACA_INSTRUCTION, "completion_column": ALPACA_OUTPUT},
    ),
    Shape(
        "prompts with completions",
        {"prompt": str, "completion": str},
        {"prompt_column": "prompt", "completion_column": "completion"},
    ),
)
"""The first that fits counts."""

_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_PAIRED = ", paired with an input that provides further context"


def known_columns(options: CausalLMConfig, data: DataSection, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that name columns, by the shape of the first training record; none where the user names columns, or
    the record has a text, or none of the shapes.

    Args:
        before: the task's options of the run that goes on, which keeps its columns; None for a new one.
    """
    if not names_no_column(options):
        return {}
    if before is not None:
        return {name: before.get(name) for name in COLUMNS_BY_SHAPE}
    record: Mapping[str, Any] = {}
    with suppress(UserError, StopIteration):  # whoever encodes the data says what is wrong with them
        record = next(iter(open_records(data, "train")))
    shape = next((one for one in SHAPES if _fits(one, record)), None)
    if shape is None or options.text_column in record:
        return {}
    settings = " ".join(f"task.{name}={column}" for name, column in shape.options.items())
    logger.info("train: the records are %s, and are read so: %s", shape.name, settings)
    return dict(shape.options)


def _fits(shape: Shape, record: Mapping[str, Any]) -> bool:
    return all(isinstance(record.get(name), kind) for name, kind in shape.columns.items())


def reads_alpaca(options: Any) -> bool:
    """Whether a task with these options reads the columns of Alpaca."""
    columns = getattr(options, "prompt_column", None), getattr(options, "completion_column", None)
    return columns == (ALPACA_INSTRUCTION, ALPACA_OUTPUT)


def alpaca_prompt(instruction: str, given: str | None) -> str:
    """The text that Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca) puts around an instruction and its input,
    which may be absent, null (as in tables) or empty."""
    about = f"### Input:\n{given}\n\n" if given and given.strip() else ""
    return _ALPACA.format(paired=_PAIRED if about else "", instruction=instruction, input=about)
