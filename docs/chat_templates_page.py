"""``docs/chat_templates.md``: what is learned of a chat under the templates that TRL ships."""

import re
from importlib.resources import files
from importlib.util import find_spec
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drawbar.data.packing import IGNORED_LABEL
from drawbar.errors import UserError
from drawbar.tasks.chat import ChatFormat
from drawbar.tasks.messages import Chat

IS_AVAILABLE = find_spec("trl") is not None
SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^<>｜]+｜>|<[a-z_]+\|>|<\|[a-z_]+>|\[/?INST\]|</?s>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|bos|eos)>"
)
"""What a template writes that is one token in its own tokenizer."""
CHAT = [
    {"role": "user", "content": "Sky?"},
    {"role": "assistant", "content": "Blue.", "reasoning_content": "Look up."},
    {"role": "user", "content": "Grass?"},
    {"role": "assistant", "content": "Green.", "reasoning_content": "Look down."},
]
PAGE = """# Chat templates, and what is learned of a chat

What [`causal_lm`](tasks.md#instruction-tuning) learns of this chat, under each of the {count} templates of public
models that TRL {version} ships: *Sky?* — *Blue.* (after thinking *Look up.*) — *Grass?* — *Green.* (after thinking
*Look down.*). Thoughts are given as `reasoning_content`. `make docs` writes this page. It uses a tokenizer of bytes
with the special tokens that a template names, so it shows what templates do, not what your tokenizer does: `drawbar
prepare CONFIG --show 1` shows that.

- **Found by** `generation`: the template marks answers itself (`{{% generation %}}`); most of these are TRL's variants
  for training. `messages`: drawbar finds what the template writes of each message, after the header that asks for an
  answer.
- Thoughts of earlier answers are **left out** by: {left_out}.
  Use `task.answers: last` with them, so that no answer is learned without its thought.
- Answers end with the **mark of who speaks next**, as nothing else ends them: {by_mark}.
  After the last answer stands the tokenizer's end token.
- **Refused**: {refused}.
  They write contents in parts, as for images; drawbar trains on texts.

| template | found by | learned of the first answer | learned of the last answer |
| --- | --- | --- | --- |
{rows}
"""


class Finding(NamedTuple):
    name: str
    found_by: str
    first: str
    last: str


def render() -> str:
    from trl import __version__

    folder = files("trl") / "chat_templates"
    templates = {path.name.removesuffix(".jinja"): path.read_text("utf-8") for path in folder.iterdir()
                 if path.name.endswith(".jinja")}  # fmt: skip
    found = [_look(name, templates[name]) for name in sorted(templates)]
    taken = [one for one in found if one.found_by]
    return PAGE.format(
        count=len(found),
        version=__version__,
        left_out=_names(one for one in taken if "down" in one.last and "up" not in one.first),
        by_mark=_names(one for one in taken if re.search(r"<\|user\|>$", one.first)),
        refused=_names(one for one in found if not one.found_by),
        rows="\n".join(f"| `{one.name}` | {one.found_by} | {_code(one.first)} | {_code(one.last)} |" for one in taken),
    )


def _look(name: str, template: str) -> Finding:
    tokenizer = _tokenizer(template)
    try:
        tokens, labels = ChatFormat(tokenizer).encode(Chat(CHAT), "all")
    except UserError:
        return Finding(name, "", "", "")
    learned = [label != IGNORED_LABEL for label in labels]
    edges = [place for place in range(len(tokens)) if learned[place] != (place > 0 and learned[place - 1])]
    edges += [len(tokens)] if learned[-1] else []
    texts = [tokenizer.decode(tokens[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return Finding(name, "generation" if "generation %}" in template else "messages", texts[0], texts[-1])


def _tokenizer(template: str) -> PreTrainedTokenizerFast:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(template)} - {"<bos>", "<eos>"})})
    made.chat_template = template
    return made


def _names(found: object) -> str:
    names = [f"`{one.name}`" for one in found]  # type: ignore[attr-defined]
    return ", ".join(names) or "none"


def _code(text: str) -> str:
    return f"`{text}`".replace("\n", "↵").replace("|", "\\|")
