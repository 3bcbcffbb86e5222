"""Chats as tokens by the tokenizer's own chat template: rendered once, tokenized once, and the answers found in it."""

import json
import re
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
from numpy.typing import NDArray

from drawbar.config.schema.section import expand_path
from drawbar.data.packing import IGNORED_LABEL
from drawbar.errors import UserError
from drawbar.tasks.messages import DOCUMENTS, TOOLS, Chat, Message, check_message
from drawbar.util.file_content import pointer

TURN_KEY = "drawbar_turn"
"""The key under which a message carries its number into a marked template."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters of Unicode: no text has them
_MARK = re.compile(f"{_OPEN}(\\d+):(\\d*){_CLOSE}")


def mark_turns(template: str) -> str:
    """The same template, which also writes a mark where a loop reaches a message, and where the loop ends.

    Raises:
        jinja2.TemplateSyntaxError: it is not a template.
    """
    # whitespace control as transformers compiles templates; what it removes is then no part of the text between tags
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    parts: list[str] = []
    tag: list[str] = []
    loops = 0
    open_loops: list[int] = []
    for _, kind, value in environment.lex(template):
        # "{" and white space before a tag, which the tag removes: without it, the brace would be part of the tag
        brace_before_tag = kind == "data" and value.endswith("{")
        parts.append(f"{value[:-1]}{{{{ '{{' }}}}" if brace_before_tag else value)
        if kind == "block_begin":
            tag = []
        elif kind != "block_end":
            tag += [value] if kind != "whitespace" else []
        elif tag[0] == "for":
            loops += 1
            open_loops.append(loops)
            # items of loops over other things have no such key: there the expression renders as nothing
            number = f"{{{{ {tag[1]}['{TURN_KEY}'] }}}}" if tag[2] == "in" else ""
            parts.append(f"{_OPEN}{loops}:{number}{_CLOSE}")
        elif tag[0] == "endfor":
            parts.append(f"{_OPEN}{open_loops.pop()}:{_CLOSE}")
    return "".join(parts)


def split_turns(marked: str) -> tuple[str, dict[int, tuple[int, int]]]:
    """Split the output of a marked template into the text without marks and the character span ``[start, end)`` of each
    message.

    Templates also have loops that read messages and write nothing: of a message's several spans, the longest is kept.
    """
    text = ""
    found: dict[int, tuple[int, int]] = {}
    current: dict[str, tuple[int, int]] = {}
    at = 0
    for mark in _MARK.finditer(marked):
        text += marked[at : mark.start()]
        at = mark.end()
        loop, number = mark.groups()
        if loop in current:
            message, start = current.pop(loop)
            found[message] = max(found.get(message, (0, 0)), (start, len(text)), key=lambda span: span[1] - span[0])
        if number:
            current[loop] = int(number), len(text)
    return text + marked[at:], found


Span = tuple[int, int]
"""Half-open range ``[start, stop)`` of characters or of tokens."""

QUESTION: Message = {"role": "user", "content": "1 + 1?"}
ANSWER: Message = {"role": "assistant", "content": "2"}
_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values of a message's key that mean nothing."""
_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


class ChatFormat:
    """Finds, by a tokenizer's chat template, the tokens of a chat that the assistant writes: those to be learned.

    They are those within ``{% generation %}``, as for transformers' ``return_assistant_tokens_mask``. In a template
    without this tag, they are each of the assistant's messages, from after the header that asks for an answer (what
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
        self._headers: dict[str, list[int]] = {}
        try:
            self._check_writes_texts()
            self._header({})
            self.stop_tokens = self._stop_tokens()
        except UserError as error:
            raise UserError(
                f"the chat template cannot write a question with its answer: {error.what}",
                where="task.chat_template",
                remedy="use one that writes all messages in one loop, or has {% generation %} around what the "
                "assistant says",
            ) from error

    def encode(self, chat: Chat, answers: Literal["all", "last"]) -> tuple[list[int], list[int]]:
        """A chat as tokens and labels; the tokens are those of ``apply_chat_template``.

        Where the template writes no end token after the last answer, the tokenizer's is added: otherwise no model could
        learn to stop.

        Raises:
            UserError: an item is not a message, none is the assistant's, or the template refuses them.
        """
        messages = [check_message(message) for message in chat.messages]
        if not any(message["role"] == "assistant" for message in messages):
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise UserError(
                f"the chat has no message of the assistant, only of: {roles}" if roles else "the chat has no messages",
                remedy='each needs one: {"role": "assistant", "content": …}, or {"from": "gpt", "value": …}',
            )
        tokens, spans = self._answers(Chat(messages, chat.options))
        end = self.tokenizer.eos_token_id
        if end is not None and spans and spans[-1][1] == len(tokens) and not self._ended(tokens, spans[-1]):
            tokens.append(end)
            spans[-1] = spans[-1][0], len(tokens)
        labels = [IGNORED_LABEL] * len(tokens)
        for start, stop in spans if answers == "all" else spans[-1:]:
            labels[start:stop] = tokens[start:stop]
        return tokens, labels

    def _stop_tokens(self) -> list[int]:
        """The ids of the tokens with which a model trained on these answers ends its text."""
        tokens, spans = self._answers(Chat([QUESTION, ANSWER]))
        if spans and not self._ended(tokens, spans[-1]):  # then the mark of who speaks next is the end
            tokens, spans = self._answers(Chat([QUESTION, ANSWER, QUESTION]))
        ends = {tokens[self._end_of(tokens, span)] for span in spans}
        return sorted((ends | {self.tokenizer.eos_token_id}) & self.special)

    def _answers(self, chat: Chat) -> tuple[list[int], list[Span]]:
        """The chat's tokens, and which of them the assistant writes, end tokens included."""
        tokens, spans = self._by_generation(chat) if _is_annotated(self._template(chat)) else self._by_turns(chat)
        return tokens, [self._with_next_mark(tokens, span) for span in spans]

    def _ended(self, tokens: list[int], span: Span) -> bool:
        return span[1] > span[0] and tokens[self._end_of(tokens, span)] in self.special

    def _end_of(self, tokens: list[int], span: Span) -> int:
        """The place of an answer's last token, but for white space behind an end token."""
        last = next((place for place in reversed(range(*span)) if tokens[place] in self.special), span[1] - 1)
        return span[1] - 1 if self.tokenizer.decode(tokens[last + 1 : span[1]]).strip() else last

    def _with_next_mark(self, tokens: list[int], span: Span) -> Span:
        """An answer without an end token stops with what follows it, such as GLM's mark of who speaks next."""
        followed = span[1] < len(tokens) and tokens[span[1]] in self.special
        return (span[0], span[1] + 1) if followed and not self._ended(tokens, span) else span

    def _template(self, chat: Chat) -> str:
        """The template that writes this chat: a tokenizer may have a separate one for chats with tools."""
        return self.tokenizer.get_chat_template(tools=chat.options.get(TOOLS))

    def _by_generation(self, chat: Chat) -> tuple[list[int], list[Span]]:
        options = {"return_dict": True, "tokenizer_kwargs": {"return_offsets_mapping": True, "verbose": False}}
        found = apply_template(self.tokenizer, chat, return_assistant_tokens_mask=True, **options)
        tokens, mask, offsets = list(found["input_ids"]), list(found["assistant_masks"]), found["offset_mapping"]
        for place in range(1, len(mask)):  # transformers omits later tokens of an answer's last character, if any
            mask[place] |= mask[place - 1] and offsets[place] == offsets[place - 1]
        edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
        return tokens, list(zip(edges[::2], edges[1::2], strict=True))

    def _by_turns(self, chat: Chat) -> tuple[list[int], list[Span]]:
        text = apply_template(self.tokenizer, chat, tokenize=False)
        tokens, offsets = self._tokenize(text)
        turns, header = self._turns(chat, text), self._header(chat.options)
        of_assistant = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        return tokens, [self._answer(text, tokens, offsets, turns[number], header) for number in of_assistant]

    def _answer(self, text: str, tokens: list[int], offsets: NDArray[np.int64], turn: Span, header: list[int]) -> Span:
        """The span of tokens that the assistant writes within its turn (a span of characters)."""
        start, stop = overlapping(offsets, turn)
        start += _header_length(tokens[start:stop], header)
        last = next((place for place in reversed(range(start, stop)) if tokens[place] in self.special), None)
        if last is not None and not text[offsets[last, 1] : turn[1]].strip():
            stop = last + 1  # no model is asked for the white space after its end token
        return start, stop

    def _turns(self, chat: Chat, text: str) -> dict[int, Span]:
        """The characters of each message in the text that the template makes of them."""
        numbered = [{**message, TURN_KEY: str(number)} for number, message in enumerate(chat.messages)]
        template = _marked(self._template(chat))
        marked = apply_template(self.tokenizer, Chat(numbered, chat.options), tokenize=False, chat_template=template)
        without_marks, turns = split_turns(marked)
        answers = {number for number, message in enumerate(chat.messages) if message["role"] == "assistant"}
        if without_marks != text or not turns.keys() >= answers:
            raise UserError(
                "the chat template does not write every message in a loop over them, so no answer can be found",
                remedy="set task.chat_template to one with {% generation %} and {% endgeneration %} around what the "
                "assistant says",
            )
        return turns

    def _check_writes_texts(self) -> None:
        """Refuse a template that writes only contents in parts, as those of some models for images do."""
        if QUESTION["content"] not in apply_template(self.tokenizer, Chat([QUESTION, ANSWER]), tokenize=False):
            raise UserError(
                "it leaves out a message whose content is a text",
                remedy="set task.chat_template to one that writes message.content",
            )

    def _header(self, options: Mapping[str, Any]) -> list[int]:
        """The tokens that ask for an answer, such as ``<|im_start|>assistant\\n``; none in an annotated template.

        Arguments of the template may change them (``enable_thinking``); tools and documents, which differ by record, do
        not.
        """
        own = {name: value for name, value in options.items() if name not in (TOOLS, DOCUMENTS)}
        key = json.dumps(own, sort_keys=True, default=str)
        if key not in self._headers:
            chat = Chat([QUESTION, ANSWER], own)
            self._headers[key] = [] if _is_annotated(self._template(chat)) else self._find_header(chat)
        return self._headers[key]

    def _find_header(self, chat: Chat) -> list[int]:
        text = apply_template(self.tokenizer, chat, tokenize=False)
        begin, _ = self._turns(chat, text)[1]
        question = Chat(chat.messages[:1], chat.options)
        asked = apply_template(self.tokenizer, question, tokenize=False, add_generation_prompt=True)
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


@cache
def _is_annotated(template: str) -> bool:
    """Whether a template says itself what the assistant writes."""
    return _GENERATION.search(template) is not None


@cache
def _marked(template: str) -> str:
    """The template with marks between messages."""
    return mark_turns(template)


def _header_length(turn: list[int], header: list[int]) -> int:
    """Tokens of an assistant's turn up to the end of its header."""
    size = len(header)
    for before in range(len(turn) - size + 1):  # a begin token may come first
        if turn[before : before + size] == header:
            return before + size
    # the header may contain an empty thinking block, which the template omits in earlier turns
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(turn, header, strict=False)))


def overlapping(offsets: NDArray[np.int64], span: Span) -> Span:
    """The tokens that share characters with the span."""
    before = int((offsets[:, 1] <= span[0]).sum())
    return before, max(before, int((offsets[:, 0] < span[1]).sum()))


def chat_prompt(tokenizer: Any, chat: Chat) -> list[int]:
    """The tokens of a chat to be answered, with the header that asks for an answer. A last answer is left out.

    Raises:
        UserError: there is no template, an item is not a message, or the template refuses them.
    """
    check_template(tokenizer)
    asked = [check_message(message) for message in chat.messages]
    if asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not asked:
        raise UserError("the chat has no message to answer", remedy='begin with {"role": "user", "content": …}')
    options = {"return_dict": True, "add_generation_prompt": True}
    return list(apply_template(tokenizer, Chat(asked, chat.options), **options)["input_ids"])


def parts_written(tokenizer: Any, chat: Chat) -> dict[str, bool]:
    """Whether the template writes something else without a key of the messages, for each besides role and content; and
    whether it names each option."""
    template = tokenizer.get_chat_template(tools=chat.options.get(TOOLS))
    messages = [check_message(message) for message in chat.messages]

    def written(left_out: str | None) -> str | None:
        kept = [{key: value for key, value in message.items() if key != left_out} for message in messages]
        try:
            return apply_template(tokenizer, Chat(kept, chat.options), tokenize=False)
        except UserError:
            return None

    whole = written(None)
    used = dict.fromkeys(key for message in messages for key, value in message.items() if value not in _NOTHING)
    found = {key: written(key) != whole for key in used if key not in ("role", "content")}
    return found | {option: re.search(rf"\b{re.escape(option)}\b", template) is not None for option in chat.options}


def check_template(tokenizer: Any) -> None:
    """Raises UserError if the tokenizer has no chat template."""
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


def apply_template(tokenizer: Any, chat: Chat, **options: Any) -> Any:
    """transformers' ``apply_chat_template``; whatever the template raises is an error of the record."""
    try:
        return tokenizer.apply_chat_template(chat.messages, **chat.options, **options)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"line {error.lineno} of the chat template: {error.message}",
            where="task.chat_template",
            remedy="correct the template",
        ) from error
    except Exception as error:  # a template is a program, and may raise anything
        raise UserError(
            f"the chat template refuses the messages: {error}",
            remedy="correct the record: a list of {role, content}, in the order that the template wants",
        ) from error
