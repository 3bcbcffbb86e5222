"""Text from a causal language model: prompts in a batch, with a key-value cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drawbar.data.tokenizer import begin_tokens, special_tokens_around
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.tasks.chat import chat_prompt
from drawbar.tasks.writing import left_padded


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
        common = {"max_new_tokens": self.max_new_tokens, "num_beams": self.beams}
        if self.temperature == 0:
            return {**common, "do_sample": False}
        return {
            **common,
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


Prompt = str | list[dict[str, Any]]
"""The beginning of a document (empty: its very beginning), or the messages of a chat, by its chat template."""


def generate_text(engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], sampling: Sampling) -> list[str]:
    """What the model goes on with after each prompt (the prompt itself left out).

    Raises:
        UserError: the model writes no text, or a prompt and its continuation do not fit its positions.
    """
    if tokenizer is None:
        raise UserError(
            "this run's task has no tokenizer: its model writes no text",
            where="RUN",
            remedy="name the run of a language model; `drawbar eval` works for any",
        )
    encoded = [
        _begun(tokenizer, prompt) if isinstance(prompt, str) else chat_prompt(tokenizer, prompt) for prompt in prompts
    ]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    inputs = left_padded(encoded, pad)
    try:
        out_BL = engine.generate(inputs, pad_token_id=pad, **sampling.options())
    except (ValueError, IndexError) as error:
        raise UserError(f"the model cannot go on from this prompt: {error}", remedy="shorten it") from error
    return tokenizer.batch_decode(out_BL[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _begun(tokenizer: Any, text: str) -> list[int]:
    before, _ = special_tokens_around(tokenizer)
    return [*before, *tokenizer(text, add_special_tokens=False)["input_ids"]] or begin_tokens(tokenizer)
