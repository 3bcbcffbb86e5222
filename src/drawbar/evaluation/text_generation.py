"""Text generation with a causal language model: batched prompts, with a key-value cache."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drawbar.config.schema.task_sections import GenerationSection
from drawbar.data.tokenizer import begin_tokens, special_tokens_around
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.runtime.log import logger
from drawbar.tasks.chat import chat_prompt
from drawbar.tasks.generation import continuations, tokens_left
from drawbar.tasks.messages import as_chat


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    beams: int = 1

    @property
    def section(self) -> GenerationSection:
        """As the generation section of a task."""
        return GenerationSection.model_construct(**asdict(self))


PROMPTS_TOGETHER = 32
"""Number of prompts continued at once, so that a file with any number of prompts fits into memory."""

Prompt = str | list[dict[str, Any]] | dict[str, Any]
"""The beginning of a document (empty to start a new one), or a chat: its messages, or a dict of ``messages`` and other
arguments of the chat template, such as ``tools``."""


def generate_text(
    engine: Engine,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    write: Callable[[str], None] | None = None,
) -> list[str]:
    """The model's continuation of each prompt, without the prompt. A text ends when the model has no more positions.

    Args:
        write: see ``continuations``.

    Raises:
        UserError: the model cannot continue a text, or a prompt has no tokens or more than the model has positions.
    """
    if tokenizer is None:
        raise UserError(
            "this run's task has no tokenizer: its model writes no text",
            where="RUN",
            remedy="name the run of a language model; `drawbar eval` works for any",
        )
    if getattr(getattr(engine.meta_model, "config", None), "is_encoder_decoder", False):
        raise UserError(
            "the model is an encoder-decoder: its text is an answer to an input, and does not continue a prompt",
            where="RUN",
            remedy="`drawbar predict` writes its text for each record of a file, in Python `predict` does",
        )
    engine.check_writes_text()
    encoded = [_tokens(tokenizer, prompt) for prompt in prompts]
    if [] in encoded:
        raise UserError(
            f"prompt {encoded.index([]) + 1} has no tokens, and the tokenizer has none that begins a text",
            where="--prompt, --input",
            remedy="write the first word of the text into the prompt",
        )
    if encoded and engine.max_positions is not None:
        _check_prompt_lengths(encoded, engine.max_positions, sampling)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    batches = [encoded[at : at + PROMPTS_TOGETHER] for at in range(0, len(encoded), PROMPTS_TOGETHER)]
    with engine.inference() as model:
        return [
            text for batch in batches for text in continuations(model, tokenizer, batch, pad, sampling.section, write)
        ]


def _check_prompt_lengths(prompts: list[list[int]], positions: int, sampling: Sampling) -> None:
    """Before generating: refuse a prompt with more tokens than positions, and warn if texts may be cut short."""
    lengths = list(map(len, prompts))
    longest = max(lengths)
    if longest > positions:
        which = f"prompt {lengths.index(longest) + 1}" if len(prompts) > 1 else "the prompt"
        raise UserError(
            f"{which} has {longest} tokens, and the model {positions} positions",
            where="--prompt, --input",
            remedy=f"shorten it: the prompt and what follows (--max-new-tokens {sampling.max_new_tokens}) share them",
        )
    max_tokens = tokens_left(longest, positions)
    if max_tokens < sampling.max_new_tokens:
        logger.warning(
            "the model has %d positions, and a text ends there: the longest prompt leaves room for %d of "
            "--max-new-tokens %d",
            *(positions, max_tokens, sampling.max_new_tokens),
        )


def _tokens(tokenizer: Any, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        record = {"messages": prompt} if isinstance(prompt, list) else prompt
        return chat_prompt(tokenizer, as_chat(record, record["messages"]))
    before, _ = special_tokens_around(tokenizer)
    return [*before, *tokenizer(prompt, add_special_tokens=False)["input_ids"]] or begin_tokens(tokenizer)
