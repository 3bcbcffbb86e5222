"""What ``drawbar generate`` is asked to go on from: texts, and the messages of chats."""

import json
from typing import TYPE_CHECKING, Any

from drawbar.config.data import DataSection
from drawbar.data.sources import open_records
from drawbar.errors import UserError

if TYPE_CHECKING:
    from drawbar.evaluation.generate import Prompt


def read_prompts(path: str, messages_column: str | None) -> "list[Prompt]":
    """The prompts of a file.

    Args:
        messages_column: the key of the messages, for a chat model.

    Raises:
        UserError: a record has none.
    """
    records = open_records(DataSection(test=path), "test")
    prompts: list[Prompt] = []
    for number, record in enumerate(records):
        messages = record.get(messages_column) if messages_column is not None else None
        prompt = messages if isinstance(messages, list) else record.get("prompt", record.get("text"))
        if not isinstance(prompt, str | list):
            of_chat = f' or {{"{messages_column}": [{{"role": "user", "content": …}}]}}' if messages_column else ""
            raise UserError(
                "the record has no prompt",
                where=records.where(number),
                remedy=f'write {{"prompt": "what to go on from"}}{of_chat}',
            )
        prompts.append(prompt)
    return prompts


def default_prompts(is_chat: bool) -> "list[Prompt]":
    """What a model goes on from where nobody says it: the beginning of a document.

    Raises:
        UserError: it is a chat model, which has nothing to answer.
    """
    if is_chat:
        raise UserError(
            "this run's model answers messages, and there is none",
            where="--prompt",
            remedy='ask it something, as in --prompt "Who are you?", or give --raw',
        )
    return [""]


def as_messages(prompt: "Prompt") -> list[dict[str, Any]]:
    """A prompt for a chat model: a JSON list of messages as it is, and any other text as what the user says."""
    if isinstance(prompt, list):
        return prompt
    try:
        found = json.loads(prompt)
    except ValueError:
        found = None
    if isinstance(found, list) and found and all(isinstance(message, dict) for message in found):
        return found
    return [{"role": "user", "content": prompt}]
