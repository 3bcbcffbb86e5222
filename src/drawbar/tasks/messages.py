"""Chats as records have them: their messages, checked, and what else of a record the chat template gets."""

import json
from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from drawbar.config.schema.data_section import DataSection
from drawbar.config.schema.task_sections import COLUMNS_BY_SHAPE, TEMPLATE_COLUMNS, CausalLMConfig, names_no_column
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
        before: the task's options of the run that resumes, which keeps its columns; None for a new one.
    """
    if not names_no_column(options):
        return {}
    if before is not None:
        return {name: before.get(name) for name in COLUMNS_BY_SHAPE}
    record: Mapping[str, Any] = {}
    with suppress(UserError, StopIteration):  # encoding reports what is wrong with the data
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


Message = dict[str, Any]
TOOLS, DOCUMENTS, ARGUMENTS, SYSTEM = TEMPLATE_COLUMNS


class Chat(NamedTuple):
    """A chat as its record has it."""

    messages: list[Any]
    options: dict[str, Any] = {}
    """What else the template gets: tools, documents, its own arguments."""
    left_out: tuple[str, ...] = ()
    """Columns of the record that hold something else than the template could get."""


SPEAKERS = ("system", "developer", "user", "assistant")
"""Roles of which the content is text. What others say, such as a tool, may be any value."""
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""The roles of chat templates, by what ShareGPT and LLaMA-Factory call them (``from``); other names are equal."""
_SHAREGPT_CALLS = ("function_call", "tool_call")
_OWN_ARGUMENTS = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""What belongs to the call, and not to the template."""


def as_chat(record: Mapping[str, Any], messages: list[Any]) -> Chat:
    """The messages of a record, with what else of it is for the template: ``TEMPLATE_COLUMNS``.

    Messages may be those of ShareGPT, with ``from`` and ``value``. ``system`` becomes the first message, unless there
    is one; tools and arguments may be JSON as text, as tables have them. Keys without a value are left out of messages
    and tools, as TRL does: Arrow gives each record the keys of all.

    Raises:
        UserError: these are not what templates take.
    """
    given = {name: _from_json(record.get(name)) for name in TEMPLATE_COLUMNS}
    tools, documents, arguments = (given[name] or None for name in (TOOLS, DOCUMENTS, ARGUMENTS))
    wrong = next((name for name, kind in ((TOOLS, list), (ARGUMENTS, dict)) if _is_other(given[name], kind)), None)
    taken = [name for name in arguments or () if name in _OWN_ARGUMENTS]
    if wrong or taken:
        is_what = f"{wrong!r} is {type(given[wrong]).__name__}" if wrong else f"{ARGUMENTS!r} holds {taken[0]!r}"
        raise UserError(
            f"{is_what}, which no chat template takes",
            remedy=f"give {TOOLS!r} as a list of JSON schemas, and {ARGUMENTS!r} as a dict of the template's variables",
        )
    options = {name: value for name, value in (arguments or {}).items() if value is not None}
    if tools:
        options[TOOLS] = [_from_json(tool) if isinstance(tool, str) else _without_none(tool) for tool in tools]
    left_out = []
    if isinstance(documents, list) and all(isinstance(document, dict) for document in documents):
        options[DOCUMENTS] = documents
    elif documents:
        left_out.append(DOCUMENTS)
    messages = [_without_none(_from_sharegpt(message)) for message in messages]
    system = record.get(SYSTEM)
    if isinstance(system, str) and system.strip() and not _has_system(messages):
        messages = [{"role": "system", "content": system}, *messages]
    elif system:
        left_out.append(SYSTEM)
    return Chat(messages, options, tuple(left_out))


def _from_sharegpt(message: Any) -> Any:
    """``{"from": "human", "value": …}`` as ``{"role": "user", "content": …}``; anything else as it is."""
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys() or "role" in message:
        return message
    spoken, said = message["from"], message["value"]
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    call = _from_json(said) if spoken in _SHAREGPT_CALLS else None
    if isinstance(call, dict):
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}], **rest}
    return {"role": _SHAREGPT_ROLES.get(spoken, spoken), "content": said, **rest}


def _is_other(value: Any, kind: type) -> bool:
    return bool(value) and not isinstance(value, kind)


def _from_json(value: Any) -> Any:
    """What a text says in JSON; None for a blank one. Other texts and values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        return value


def _without_none(value: Any) -> Any:
    """The value without the keys of dicts that hold None, but for the content of a message."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = ((key, item) for key, item in value.items() if item is not None or (key == "content" and "role" in value))
    return {key: _without_none(item) for key, item in kept}


def _has_system(messages: list[Any]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, dict) and first.get("role") in ("system", "developer")


def check_message(message: Any) -> Message:
    """The message, where it is one; a content in parts (``[{"type": "text", "text": …}]``) becomes one text.

    Raises:
        UserError: it does not say who speaks, or what; or a part of its content is no text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{str(message)[:60]!r} is no message", remedy='write {"role": …, "content": …}')
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise UserError(f"a message of the {message['role']} has no content", remedy="correct the record")
    if not isinstance(content, list):
        return message
    other = next((part for part in content if not _is_text_part(part)), None)
    if other is None:
        return {**message, "content": "".join(part["text"] for part in content)}
    if message["role"] not in SPEAKERS:  # such as what a tool returns: a list of any values, which the template writes
        return message
    kind = other.get("type") if isinstance(other, dict) else None
    raise UserError(
        f"a message of the {message['role']} has a part that is not text: {kind or str(other)[:60]!r}",
        remedy='give the content as one text, or in parts such as {"type": "text", "text": …}; images are not read',
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def message_text(message: Message) -> str:
    """What a checked message says; a call of a tool says nothing."""
    content = message.get("content")
    return content if isinstance(content, str) else ""
