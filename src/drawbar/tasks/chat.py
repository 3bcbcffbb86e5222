"""Chats as tokens by the tokenizer's own chat template: rendered once, tokenized once, and the answers found in it."""

import re
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
from numpy.typing import NDArray

from drawbar.config.schema.section import expand_path
from drawbar.data.packing import IGNORED_LABEL
from drawbar.errors import UserError
from drawbar.tasks.turns import TURN_KEY, mark_turns, split_turns
from drawbar.util.file_content import pointer

Message = dict[str, Any]
Span = tuple[int, int]
"""Half-open range ``[start, stop)`` of characters or of tokens."""

QUESTION: Message = {"role": "user", "content": "1 + 1?"}
ANSWER: Message = {"role": "assistant", "content": "2"}
SPEAKERS = ("system", "developer", "user", "assistant")
"""Roles of which the content is text. What others say, such as a tool, may be any value."""
_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


class ChatFormat:
    """Finds, by a tokenizer's chat template, the tokens of a chat that the assistant writes: those to be learnt.

    They are those within ``{% generation %}``, as for transformers' ``return_assistant_tokens_mask``. In a template
    without this tag, they are each of the assistant's messages, from behind the header that asks for an answer (what
    ``add_generation_prompt`` adds) to the end token.

    Raises:
        UserError: there is no template, the tokenizer cannot say which letters a token is made of, or the template
            cannot write a question with its answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        check_template(tokenizer)
        if not tokenizer.is_fast:
            raise UserError(
                f"{type(tokenizer).__name__} cannot say which letters a token is made of, so no answer can be found",
                where="task.tokenizer",
                remedy="chats need a fast tokenizer, one with a tokenizer.json",
            )
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.annotated = _GENERATION.search(tokenizer.get_chat_template()) is not None
        try:
            self._check_writes_texts()
            self.header = [] if self.annotated else self._header()
            self.stop_tokens = self._stop_tokens()
        except UserError as error:
            raise UserError(
                f"the chat template cannot write a question with its answer: {error.what}",
                where="task.chat_template",
                remedy="use one that writes all messages in one loop, or has {% generation %} around what the "
                "assistant says",
            ) from error

    @cached_property
    def marked(self) -> str:
        """The template with marks between messages."""
        return mark_turns(self.tokenizer.get_chat_template())

    def encode(self, messages: list[Any], answers: Literal["all", "last"]) -> tuple[list[int], list[int]]:
        """A chat as tokens and labels; the tokens are those of ``apply_chat_template``.

        Where the template writes no end token after the last answer, the tokenizer's is added: nobody could learn to
        stop otherwise.

        Raises:
            UserError: an item is no message, none is the assistant's, or the template refuses them.
        """
        messages = [check_message(message) for message in messages]
        if not any(message["role"] == "assistant" for message in messages):
            raise UserError(
                "the chat has no message of the assistant", remedy='each needs one: {"role": "assistant", "content": …}'
            )
        tokens, spans = self._answers(messages)
        end = self.tokenizer.eos_token_id
        if end is not None and spans and spans[-1][1] == len(tokens) and not self._ended(tokens, spans[-1]):
            tokens.append(end)
            spans[-1] = spans[-1][0], len(tokens)
        labels = [IGNORED_LABEL] * len(tokens)
        for start, stop in spans if answers == "all" else spans[-1:]:
            labels[start:stop] = tokens[start:stop]
        return tokens, labels

    def last_answer(self, messages: list[Any]) -> str:
        """The last assistant message as the template renders it, to compare with what the model generates."""
        _, labels = self.encode(messages, "last")
        return self.tokenizer.decode([label for label in labels if label != IGNORED_LABEL], skip_special_tokens=True)

    def _stop_tokens(self) -> list[int]:
        """The ids of the tokens with which a model trained on these answers ends its text."""
        tokens, spans = self._answers([QUESTION, ANSWER])
        if spans and not self._ended(tokens, spans[-1]):  # then the mark of who speaks next is the end
            tokens, spans = self._answers([QUESTION, ANSWER, QUESTION])
        ends = {tokens[stop - 1] for _, stop in spans}
        return sorted((ends | {self.tokenizer.eos_token_id}) & self.special)

    def _answers(self, messages: list[Message]) -> tuple[list[int], list[Span]]:
        """The chat's tokens, and which of them the assistant writes, end tokens included."""
        tokens, spans = self._by_generation(messages) if self.annotated else self._by_turns(messages)
        return tokens, [self._with_next_mark(tokens, span) for span in spans]

    def _ended(self, tokens: list[int], span: Span) -> bool:
        return span[1] > span[0] and tokens[span[1] - 1] in self.special

    def _with_next_mark(self, tokens: list[int], span: Span) -> Span:
        """An answer without an end token stops with what follows it, such as GLM's mark of who speaks next."""
        followed = span[1] < len(tokens) and tokens[span[1]] in self.special
        return (span[0], span[1] + 1) if followed and not self._ended(tokens, span) else span

    def _by_generation(self, messages: list[Message]) -> tuple[list[int], list[Span]]:
        options = {"return_dict": True, "tokenizer_kwargs": {"return_offsets_mapping": True, "verbose": False}}
        found = apply_template(self.tokenizer, messages, return_assistant_tokens_mask=True, **options)
        tokens, mask, offsets = list(found["input_ids"]), list(found["assistant_masks"]), found["offset_mapping"]
        for place in range(1, len(mask)):  # transformers omits later tokens of an answer's last character, if any
            mask[place] |= mask[place - 1] and offsets[place] == offsets[place - 1]
        edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
        return tokens, list(zip(edges[::2], edges[1::2], strict=True))

    def _by_turns(self, messages: list[Message]) -> tuple[list[int], list[Span]]:
        text = apply_template(self.tokenizer, messages, tokenize=False)
        tokens, offsets = self._tokenize(text)
        turns = self._turns(messages, text)
        of_assistant = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return tokens, [self._answer(text, tokens, offsets, turns[number]) for number in of_assistant]

    def _answer(self, text: str, tokens: list[int], offsets: NDArray[np.int64], turn: Span) -> Span:
        """The span of tokens that the assistant writes within its turn (a span of characters)."""
        start, stop = overlapping(offsets, turn)
        start += self._header_length(tokens[start:stop])
        last = next((place for place in reversed(range(start, stop)) if tokens[place] in self.special), None)
        if last is not None and not text[offsets[last, 1] : turn[1]].strip():
            stop = last + 1  # no model is asked for the white space behind its end token
        return start, stop

    def _header_length(self, turn: list[int]) -> int:
        """Tokens of an assistant's turn up to the end of its header."""
        size = len(self.header)
        for before in range(len(turn) - size + 1):  # a begin token, say, may come first
            if turn[before : before + size] == self.header:
                return before + size
        # the header may contain an empty thinking block, which the template omits in earlier turns
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(turn, self.header, strict=False)))

    def _turns(self, messages: list[Message], text: str) -> dict[int, Span]:
        """The characters of each message in the text that the template makes of them."""
        numbered = [{**message, TURN_KEY: str(number)} for number, message in enumerate(messages)]
        marked = apply_template(self.tokenizer, numbered, tokenize=False, chat_template=self.marked)
        without_marks, turns = split_turns(marked)
        answers = {number for number, message in enumerate(messages) if message["role"] == "assistant"}
        if without_marks != text or not turns.keys() >= answers:
            raise UserError(
                "the chat template does not write every message in a loop over them, so no answer can be found",
                remedy="set task.chat_template to one with {% generation %} and {% endgeneration %} around what the "
                "assistant says",
            )
        return turns

    def _check_writes_texts(self) -> None:
        """Refuse a template that writes only contents in parts, as those of some models for images do."""
        if QUESTION["content"] not in apply_template(self.tokenizer, [QUESTION, ANSWER], tokenize=False):
            raise UserError(
                "it leaves out a message whose content is a text",
                remedy="set task.chat_template to one that writes message.content",
            )

    def _header(self) -> list[int]:
        """The tokens that ask for an answer, such as ``<|im_start|>assistant\\n``."""
        chat = [QUESTION, ANSWER]
        text = apply_template(self.tokenizer, chat, tokenize=False)
        begin, _ = self._turns(chat, text)[1]
        asked = apply_template(self.tokenizer, [QUESTION], tokenize=False, add_generation_prompt=True)
        if asked[:begin] != text[:begin]:
            raise UserError(
                "it writes the question differently once it has an answer",
                remedy="set task.chat_template to one that writes each message in the same way, whatever follows",
            )
        tokens, offsets = self._tokenize(asked)
        return tokens[slice(*overlapping(offsets, (begin, len(asked))))]

    def _tokenize(self, text: str) -> tuple[list[int], NDArray[np.int64]]:
        """A text as tokens, and the characters that each is made of, (tokens, 2)."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return found["input_ids"], np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)


def overlapping(offsets: NDArray[np.int64], span: Span) -> Span:
    """The tokens that share characters with the span."""
    before = int((offsets[:, 1] <= span[0]).sum())
    return before, max(before, int((offsets[:, 0] < span[1]).sum()))


def chat_prompt(tokenizer: Any, messages: list[Any]) -> list[int]:
    """The tokens of a chat to be answered, with the header that asks for an answer. A last answer is left out.

    Raises:
        UserError: there is no template, an item is no message, or the template refuses them.
    """
    check_template(tokenizer)
    asked = [check_message(message) for message in messages]
    if asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not asked:
        raise UserError("the chat has no message to answer", remedy='begin with {"role": "user", "content": …}')
    return list(apply_template(tokenizer, asked, return_dict=True, add_generation_prompt=True)["input_ids"])


def check_message(message: Any) -> Message:
    """The message, where it is one; a content in parts (``[{"type": "text", "text": …}]``) becomes one text.

    Raises:
        UserError: it does not say who speaks, or what; or a part of its content is no text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{str(message)[:60]!r} is no message", remedy='write {"role": …, "content": …}')
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise UserError(f"a message of the {message['role']} has no content", remedy="mend the record")
    if not isinstance(content, list):
        return message
    other = next((part for part in content if not _is_text_part(part)), None)
    if other is None:
        return {**message, "content": "".join(part["text"] for part in content)}
    if message["role"] not in SPEAKERS:  # such as what a tool returns: a list of any values, which the template writes
        return message
    kind = other.get("type") if isinstance(other, dict) else None
    raise UserError(
        f"a message of the {message['role']} has a part that is no text: {kind or str(other)[:60]!r}",
        remedy='give the content as one text, or in parts such as {"type": "text", "text": …}; images are not read',
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def message_text(message: Message) -> str:
    """What a checked message says; a call of a tool says nothing."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def check_template(tokenizer: Any) -> None:
    """Raises UserError where the tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            "the tokenizer has no chat template",
            where="task.messages_column",
            remedy="use the tokenizer of a chat model, set task.chat_template, or use task.prompt_column and "
            "task.completion_column",
        )


def read_template(setting: str) -> str:
    """The chat template that ``task.chat_template`` gives: a file, or the template itself.

    Raises:
        UserError: there is no such file.
    """
    if "{{" in setting or "{%" in setting:
        return setting
    try:
        path = Path(expand_path(setting))
        found = pointer(path)
        if found is not None:
            raise ValueError(f"{path} is {found.what}")
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"the chat template cannot be read: {error}",
            where="task.chat_template",
            remedy="give a Jinja file, or the template itself",
        ) from error


def apply_template(tokenizer: Any, messages: list[Message], **options: Any) -> Any:
    """transformers' ``apply_chat_template``; whatever the template raises is an error of the record."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"line {error.lineno} of the chat template: {error.message}",
            where="task.chat_template",
            remedy="correct the template",
        ) from error
    except Exception as error:  # a template is a program of its own, and may raise anything
        raise UserError(
            f"the chat template refuses the messages: {error}",
            remedy="mend the record: a list of {role, content}, in the order that the template wants",
        ) from error
