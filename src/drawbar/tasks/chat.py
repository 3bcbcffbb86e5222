"""A chat as texts to read and texts to learn, by the tokenizer's own chat template."""

from dataclasses import dataclass, field
from typing import Any

from drawbar.errors import UserError


@dataclass(frozen=True)
class Piece:
    """Part of a conversation."""

    text: str
    target: bool
    """Whether the model learns to write it."""
    after: list[int] = field(default_factory=list)
    """Tokens that follow it."""


def chat_pieces(tokenizer: Any, messages: list[dict[str, Any]], answered: bool) -> list[Piece]:
    """The messages as the template writes them: an assistant's are targets, everything else is context.

    The template is applied to longer and longer beginnings of the chat, and what each adds is a piece: so the pieces
    together are exactly the text that the model sees when it is used.

    Args:
        messages: ``{"role": ..., "content": ...}`` each.
        answered: False for a chat to go on with: its last piece then asks for an answer.

    Raises:
        UserError: no template, no messages, or a template that rewrites earlier messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            "the tokenizer has no chat template",
            where="task.messages_column",
            remedy="use the tokenizer of a chat model, or task.prompt_column and task.completion_column",
        )
    pieces: list[Piece] = []
    done = ""
    for number, message in enumerate(map(check_message, messages)):
        if message["role"] == "assistant":
            asked = _render(tokenizer, messages[:number], ask=True)
            pieces.append(Piece(_added(done, asked), target=False))
            done = asked
            text = _render(tokenizer, messages[: number + 1], ask=False)
            pieces.append(Piece(_added(done, text), target=True))
            done = text
    if not answered:
        pieces.append(Piece(_added(done, _render(tokenizer, messages, ask=True)), target=False))
    if not pieces:
        raise UserError(
            "the chat has no message of the assistant", remedy='each needs one: {"role": "assistant", "content": …}'
        )
    return pieces


def check_message(message: Any) -> dict[str, Any]:
    """The message, where it is one.

    Raises:
        UserError: it does not say who speaks, or what.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{str(message)[:60]!r} is no message", remedy='write {"role": …, "content": …}')
    if message.get("content") is None and "tool_calls" not in message:
        raise UserError(f"a message of the {message['role']} has no content", remedy="mend the record")
    return message


def last_answer(messages: list[dict[str, Any]]) -> str:
    """What the assistant says last; nothing may follow it, or what follows is of no account."""
    return next(message["content"] for message in reversed(messages) if message["role"] == "assistant")


def _render(tokenizer: Any, messages: list[dict[str, Any]], ask: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    except Exception as error:  # a template is a program of its own, and may raise anything
        raise UserError(
            f"the chat template refuses the messages: {error}",
            remedy="mend the record: a list of {role, content}, in the order that the template wants",
        ) from error


def _added(before: str, after: str) -> str:
    if not after.startswith(before):
        raise UserError(
            "the chat template writes earlier messages differently once an answer follows",
            remedy="use a template that only appends, or chats of one answer",
        )
    return after[len(before) :]
