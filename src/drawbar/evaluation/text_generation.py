"""Text from a causal language model: prompts in a batch, with a key-value cache."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drawbar.config.schema.task_sections import GenerationSection
from drawbar.data.tokenizer import begin_tokens, special_tokens_around
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.runtime.log import logger
from drawbar.tasks.chat import chat_prompt
from drawbar.tasks.generation import generation_options, left_padded


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    beams: int = 1

    def options(self) -> dict[str, Any]:
        """As arguments of transformers' ``generate``."""
        return generation_options(GenerationSection.model_construct(**asdict(self)), max_tokens=None)


PROMPTS_TOGETHER = 32
"""How many prompts are continued at once: so a file with any number of prompts fits into memory."""

Prompt = str | list[dict[str, Any]]
"""The beginning of a document (empty: its very beginning), or the messages of a chat, by its chat template."""


def generate_text(engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], sampling: Sampling) -> list[str]:
    """What the model goes on with after each prompt (the prompt itself left out). A text ends where the model has no
    more positions.

    Raises:
        UserError: the model does not go on with a text, or a prompt has no tokens or more than the model has positions.
    """
    if tokenizer is None:
        raise UserError(
            "this run's task has no tokenizer: its model writes no text",
            where="RUN",
            remedy="name the run of a language model; `drawbar eval` works for any",
        )
    if getattr(getattr(engine.meta_model, "config", None), "is_encoder_decoder", False):
        raise UserError(
            "the model is an encoder-decoder: its text is an answer to an input, and does not go on with a prompt",
            where="RUN",
            remedy="`drawbar predict` writes its text for each record of a file, in Python `predict` does",
        )
    engine.check_writes_text()
    encoded = [
        _tokens(tokenizer, prompt) if isinstance(prompt, str) else chat_prompt(tokenizer, prompt) for prompt in prompts
    ]
    if [] in encoded:
        raise UserError(
            f"prompt {encoded.index([]) + 1} has no tokens, and the tokenizer has none that begins a text",
            where="--prompt, --input",
            remedy="write the first word of the text into the prompt",
        )
    if encoded and engine.max_positions is not None:
        _check_prompt_lengths(encoded, engine.max_positions, sampling)
    batches = [encoded[at : at + PROMPTS_TOGETHER] for at in range(0, len(encoded), PROMPTS_TOGETHER)]
    return [text for batch in batches for text in _continue(engine, tokenizer, batch, sampling)]


def _check_prompt_lengths(prompts: list[list[int]], positions: int, sampling: Sampling) -> None:
    """Before any text is written: refuse a prompt longer than the positions, and warn if texts may be cut short."""
    lengths = list(map(len, prompts))
    longest = max(lengths)
    if longest > positions:
        which = f"prompt {lengths.index(longest) + 1}" if len(prompts) > 1 else "the prompt"
        raise UserError(
            f"{which} has {longest} tokens, and the model {positions} positions",
            where="--prompt, --input",
            remedy=f"shorten it: the prompt and what follows (--max-new-tokens {sampling.max_new_tokens}) share them",
        )
    max_tokens = _tokens_left(longest, positions)
    if max_tokens < sampling.max_new_tokens:
        logger.warning(
            "the model has %d positions, and a text ends there: the longest prompt leaves room for %d of "
            "--max-new-tokens %d",
            *(positions, max_tokens, sampling.max_new_tokens),
        )


def _tokens_left(length: int, positions: int) -> int:
    """How many tokens can follow a prompt: the last of them needs no position, as the model does not read it."""
    return positions - length + 1


def _continue(engine: Engine, tokenizer: Any, prompts: list[list[int]], sampling: Sampling) -> list[str]:
    max_tokens = sampling.max_new_tokens
    if engine.max_positions is not None:
        max_tokens = min(max_tokens, _tokens_left(max(map(len, prompts)), engine.max_positions))
    if max_tokens < sampling.max_new_tokens and len(prompts) > 1:  # the longest must not end the texts of the others
        return [text for prompt in prompts for text in _continue(engine, tokenizer, [prompt], sampling)]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    inputs = left_padded(prompts, pad)
    out_BL = engine.generate(inputs, pad_token_id=pad, **{**sampling.options(), "max_new_tokens": max_tokens})
    return tokenizer.batch_decode(out_BL[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    before, _ = special_tokens_around(tokenizer)
    return [*before, *tokenizer(text, add_special_tokens=False)["input_ids"]] or begin_tokens(tokenizer)
