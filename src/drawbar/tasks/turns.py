"""Finds each message's characters in a rendered chat, by marks added to the template's loops over messages."""

import re

import jinja2

TURN_KEY = "drawbar_turn"
"""The key under which a message carries its number into a marked template."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters of Unicode: no text has them
_MARK = re.compile(f"{_OPEN}(\\d+):(\\d*){_CLOSE}")


def mark_turns(template: str) -> str:
    """The same template, which also writes a mark where a loop comes to a message, and where the loop ends.

    Raises:
        jinja2.TemplateSyntaxError: it is no template.
    """
    # whitespace control as transformers compiles templates; what it removes is then no part of the text between tags
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    parts: list[str] = []
    tag: list[str] = []
    loops = 0
    open_loops: list[int] = []
    for _, kind, value in environment.lex(template):
        parts.append(value)
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
