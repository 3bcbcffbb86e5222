"""Prompts for ``drawbar generate``: texts and chat messages."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from drawbar.config.schema.data_section import DataSection
from drawbar.config.schema.task_sections import TEMPLATE_COLUMNS
from drawbar.data.sources import Record, open_records
from drawbar.data.tables import old_name, value_at
from drawbar.errors import UserError
from drawbar.tasks.messages import ALPACA_INPUT, ALPACA_INSTRUCTION, alpaca_prompt

if TYPE_CHECKING:
    from drawbar.evaluation.text_generation import Prompt


def read_prompts(
    path: str, messages_column: str | None, rename: Mapping[str, str], is_alpaca: bool = False
) -> "list[Prompt]":
    """The prompts of a file.

    Args:
        messages_column: for a chat model, the key of the messages; dots separate the keys of nested records.
        is_alpaca: whether a record may be an instruction with an input.
        rename: as ``data.rename``. The file need not have these columns, as prompts are not training data.

    Raises:
        UserError: a record has no prompt.
    """
    records = open_records(DataSection(test=path), "test")
    prompts: list[Prompt] = []
    for number, record in enumerate(records):
        messages = _value(record, messages_column, rename) if messages_column is not None else None
        texts = (_value(record, column, rename) for column in ("prompt", "text"))
        prompt = next((text for text in texts if text is not None), None)
        if isinstance(messages, list):
            options = ((name, _value(record, name, rename)) for name in TEMPLATE_COLUMNS)
            given = {name: value for name, value in options if value is not None}
            prompt = {"messages": messages, **given} if given else messages
        if is_alpaca and isinstance(instruction := _value(record, ALPACA_INSTRUCTION, rename), str):
            prompt = {ALPACA_INSTRUCTION: instruction, ALPACA_INPUT: _value(record, ALPACA_INPUT, rename)}
        if not isinstance(prompt, str | list | dict):
            or_else = f' or {{"{messages_column}": [{{"role": "user", "content": …}}]}}' if messages_column else ""
            or_else = f' or {{"{ALPACA_INSTRUCTION}": "what to do"}}' if is_alpaca else or_else
            raise UserError(
                "the record has no prompt",
                where=records.where(number),
                remedy=f'write {{"prompt": "text to continue"}}{or_else}',
            )
        prompts.append(prompt)
    return prompts


def _value(record: Record, column: str, rename: Mapping[str, str]) -> Any:
    """A record's value in a column, by its new or its old name; None if it has neither."""
    for name in (column, old_name(column, rename)):
        with suppress(KeyError):
            return value_at(record, name)
    return None


def as_instruction(prompt: "Prompt") -> "Prompt":
    """A prompt for a model trained on Alpaca records; a plain text is an instruction without an input."""
    if isinstance(prompt, str):
        return alpaca_prompt(prompt, None)
    if isinstance(prompt, dict) and ALPACA_INSTRUCTION in prompt:
        return alpaca_prompt(prompt[ALPACA_INSTRUCTION], prompt.get(ALPACA_INPUT))
    return prompt


def as_messages(prompt: "Prompt") -> "Prompt":
    """A prompt for a chat model: messages in JSON (a list, or an object with ``messages`` and e.g. ``tools``) are kept,
    and any other text becomes a user message."""
    if not isinstance(prompt, str):
        return prompt
    try:
        found = json.loads(prompt)
    except ValueError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("messages"), list):
        return found
    if isinstance(found, list) and found and all(isinstance(message, dict) for message in found):
        return found
    return [{"role": "user", "content": prompt}]
