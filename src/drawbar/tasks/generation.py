"""Text from a model: prompts in a batch, with a key-value cache, each as if it were alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, TextStreamer

from drawbar.config.schema.task_sections import GenerationSection
from drawbar.models.heads import longest_input, pads_on_the_left, without_adapter
from drawbar.models.huggingface import quiet_transformers


def generation_options(section: GenerationSection, max_tokens: int | None) -> dict[str, Any]:
    """A generation section as arguments of transformers' ``generate``. ``temperature`` 0 is greedy.

    Args:
        max_tokens: most tokens that may be written, as the model has positions for no more; None for no limit.
    """
    most = section.max_new_tokens if max_tokens is None else min(section.max_new_tokens, max_tokens)
    common: dict[str, Any] = {"max_new_tokens": most, "num_beams": section.beams}
    if section.temperature == 0:
        return {**common, "do_sample": False}
    chance = {"temperature": section.temperature, "top_k": section.top_k, "top_p": section.top_p}
    return {**common, "do_sample": True, **chance}


ONLY_FOR_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
ONLY_FOR_BEAMS = ("length_penalty", "early_stopping")


def generation_defaults(section: GenerationSection, max_tokens: int | None) -> dict[str, Any]:
    """``generation_options`` for a generation config. Fields that have no effect are unset: transformers refuses to
    save them."""
    options = generation_options(section, max_tokens)
    of_chance = () if options["do_sample"] else ONLY_FOR_SAMPLING
    of_beams = ONLY_FOR_BEAMS if section.beams == 1 else ()
    return dict.fromkeys(("max_length", *of_chance, *of_beams)) | options


def left_padded(prompts: Sequence[list[int]]) -> dict[str, Tensor]:
    """Prompts of different lengths as ``input_ids`` and ``attention_mask`` (B, L), each ending at the last column.

    A row is padded with its own first token: a penalty for repetition, which looks at all of a row, then finds nothing
    that the prompt does not have. No token attends to the padding.
    """
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([tokens[:1] * (longest - len(tokens)) + tokens for tokens in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in prompts]),
    }


def tokens_left(length: int, positions: int) -> int:
    """How many tokens can follow a prompt: the last of them needs no position, as the model does not read it."""
    return positions - length + 1


READS_COLUMNS = ("min_length", "no_repeat_ngram_size")
"""Fields of a generation config for which padding counts as part of the text."""


def takes_prompts_together(model: nn.Module, length: int) -> bool:
    """Whether prompts in a batch get the texts that each gets alone.

    Args:
        length: of the longest prompt with its text, in tokens.
    """
    config = getattr(model, "generation_config", None)
    return pads_on_the_left(model, length) and not any(getattr(config, name, None) for name in READS_COLUMNS)


def continuations(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    pad: int,
    section: GenerationSection,
    write: Callable[[str], None] | None = None,
) -> list[str]:
    """What a causal model writes after each prompt (a list of tokens), without the prompt. A text ends where the model
    has no more positions.

    A model that cannot take padding on the left continues one prompt after another. The ranks of a sharded model then
    need equally many prompts.

    Args:
        write: called with the text of a single prompt, in parts, as soon as they are there; not with beams.
    """
    longest = max(map(len, prompts), default=0) + section.max_new_tokens
    size = len(prompts) if takes_prompts_together(model, longest) else 1
    batches = [prompts[at : at + size] for at in range(0, len(prompts), size or 1)]
    options = {} if write is None else {"streamer": _Streamer(tokenizer, write)}
    tokens = [row for batch in batches for row in _continue(model, batch, pad, section, options)]
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


class _Streamer(TextStreamer):
    """Hands on the text after the prompt, in parts that end between words."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def _continue(
    model: Any, prompts: Sequence[list[int]], pad: int, section: GenerationSection, more: dict[str, Any]
) -> list[list[int]]:
    inputs = {name: tensor.to(next(model.parameters()).device) for name, tensor in left_padded(prompts).items()}
    longest, limit = inputs["input_ids"].shape[1], longest_input(model)
    most = [section.max_new_tokens] * len(prompts)
    if limit is not None:
        most = [min(section.max_new_tokens, tokens_left(len(prompt), limit)) for prompt in prompts]
    options = generation_options(section, max(most)) | more
    if len(set(most)) == 1:
        out_BL = model.generate(**inputs, pad_token_id=pad, **options)
    else:
        ends = _OwnEnds([longest + tokens for tokens in most])
        with _positions_below(model, limit or 0), quiet_transformers():  # which counts columns, not positions
            out_BL = model.generate(**inputs, pad_token_id=pad, **options, stopping_criteria=[ends])
    return [row[longest : longest + tokens] for row, tokens in zip(out_BL.tolist(), most, strict=True)]


class _OwnEnds(StoppingCriteria):
    """Ends each row at its own column."""

    def __init__(self, ends: list[int]) -> None:
        self._ends = ends

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        rows, length = input_ids.shape  # with beams, a prompt has several rows
        ended = torch.tensor([length >= end for end in self._ends], device=input_ids.device)
        return ended.repeat_interleave(rows // len(self._ends))


@contextmanager
def _positions_below(model: nn.Module, limit: int) -> Iterator[None]:
    """While other rows continue, one that has ended at the last position is still computed, but never beyond it."""

    def clamp(module: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs.get("position_ids") is not None:
            inputs = {**inputs, "position_ids": inputs["position_ids"].clamp(max=limit - 1)}
        return args, inputs

    hook = without_adapter(model).register_forward_pre_hook(clamp, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def stop_with(model: nn.Module, tokens: list[int]) -> None:
    """Let a model's texts end with any of these tokens, too: here, and after an export."""
    config = model.generation_config
    known = config.eos_token_id
    ends = set(tokens) | set(known if isinstance(known, list) else [] if known is None else [known])
    config.eos_token_id = sorted(ends) or None
