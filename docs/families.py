"""Writes families.md: what each family of transformers computes of a sample beside others, measured on tiny random
models. ``python docs/families.py`` measures all; the tests compare the page with what they measure."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from drawbar.config.schema.task_sections import GenerationSection
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.errors import UserError
from drawbar.models.heads import HEADS, Head, check_head, pads_on_the_left, sees_neighbours
from drawbar.models.huggingface import build_from_scratch, quiet_transformers
from drawbar.models.packed import packs_without_mask
from drawbar.tasks.generation import continuations

PAGE = Path(__file__).with_name("families.md")
TASKS: dict[Head, str] = {
    "causal_lm": "causal_lm",
    "masked_lm": "masked_lm",
    "seq2seq": "seq2seq",
    "sequence_classification": "classification",
    "token_classification": "token_classification",
}
TOKENIZER = train_byte_bpe([], 257)
PAD, END = 1, TOKENIZER.eos_token_id
LENGTHS = [4, 13, 28, 7]
WRITTEN = 20
"""Tokens of each text: more than the longest prompt has positions for."""
MOST_PARAMETERS = 30e6
SEVERAL_NUMBERS = {
    "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim moe_intermediate_size": 16,
    "shared_expert_intermediate_size expert_ffn_size": 16,
    "intermediate_size ffn_dim d_ff d_inner n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim ffn_hidden_size": 32,
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers": 2,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads": 4,
    "mamba_n_heads mamba_num_heads d_kv rotary_dim attention_window sliding_window state_size mamba_d_state": 4,
    "num_local_experts num_experts n_routed_experts moe_num_experts": 4,
    "num_key_value_heads num_experts_per_tok moe_topk moe_k": 2,
    "head_dim mamba_d_head mamba_head_dim q_lora_rank kv_lora_rank v_head_dim": 8,
    "qk_rope_head_dim qk_nope_head_dim": 4,
    "n_group topk_group first_k_dense_replace n_shared_experts mamba_n_groups": 1,
    "max_position_embeddings n_positions": 32,
    "pad_token_id": PAD,
    "vocab_size_per_layer_input": 257,
}
SIZES: dict[str, Any] = {name: value for names, value in SEVERAL_NUMBERS.items() for name in names.split()}
SIZES |= {"initializer_range": 0.3, "init_std": 0.3}  # attention far from uniform: a wrong mask must show
PATTERNS: dict[str, Any] = {
    "attn_layer_indices": [1],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "block_types": ["recurrent", "attention"],
}
LEFT_OUT: list[list[str]] = [[], ["head_dim"], ["num_key_value_heads"], ["layer_types"], ["sliding_window"]]
"""Sizes that an architecture has, and does not take as they are here."""


class Row(NamedTuple):
    """What a family computes."""

    family: str
    head: Head
    padded: bool
    """Whether the logits of a padded sample are those that it has alone."""
    text: bool | None
    """Whether prompts with padding on the left have the text that they have alone; None where no text is written."""
    packed: bool

    def line(self) -> str:
        padded = "equal" if self.padded else "one by one"
        text = "–" if self.text is None else "equal" if self.text else "one by one"
        return f"| {self.family} | {TASKS[self.head]} | {padded} | {'equal' if self.packed else 'refused'} | {text} |"


class CannotBuild(Exception):
    """There is no tiny model of this family and head."""


def cases() -> Iterator[tuple[str, Head]]:
    """All families of transformers that have a head, by head."""
    return ((family, head) for head in TASKS for family in sorted(HEADS[head].families))


def measure(family: str, head: Head) -> Row:
    """Compare a batch with each of its samples alone.

    Raises:
        CannotBuild: there is no such tiny model, or it cannot be called with tokens alone.
        UserError: drawbar refuses such a head.
    """
    try:
        config = CONFIG_MAPPING[family]()
    except Exception as error:
        raise CannotBuild(f"{type(error).__name__}: {error}") from error
    check_head(config, head)
    model = _build(family, head)
    try:
        padded = _is_equal_padded(model, head)
        text = _is_equal_text(model) if head == "causal_lm" else None
    except Exception as error:
        raise CannotBuild(f"{type(error).__name__}: {error}") from error
    return Row(family, head, padded, text, packs_without_mask(model.config, head))


def declared(family: str, head: Head) -> Row:
    """What drawbar goes by, for a family that :func:`measure` measures."""
    model = _build(family, head)
    text = pads_on_the_left(model, max(LENGTHS) + WRITTEN) if head == "causal_lm" else None
    padded = not sees_neighbours(model, max(LENGTHS))
    return Row(family, head, padded, text, packs_without_mask(model.config, head))


def _build(family: str, head: Head) -> Any:
    fields = _sizes(family)
    labels = {"num_labels": 3} if head.endswith("classification") else {}
    for left_out in [*LEFT_OUT, list(fields)]:
        try:
            return _random_model(family, head, {name: fields[name] for name in fields if name not in left_out}, labels)
        except Exception as error:  # noqa: BLE001 - each architecture has errors of its own
            last = error
    raise CannotBuild(f"{type(last).__name__}: {last}") from last


def _sizes(family: str) -> dict[str, Any]:
    kind = CONFIG_MAPPING[family]
    usual = kind()
    given = usual.to_dict()
    own = set(given) | {field.name for field in dataclasses.fields(kind)}
    optional = ("num_key_value_heads", "head_dim", "pad_token_id", "num_experts_per_tok")
    fields = {name: value for name, value in (SIZES | PATTERNS).items() if name in own}
    fields = {name: value for name, value in fields.items() if name in optional or given.get(name) is not None}
    if "qk_rope_head_dim" in fields:
        # latent attention: all heads have keys of their own, and rotary embeddings for a part of them
        fields |= {"head_dim": fields["qk_rope_head_dim"], "num_key_value_heads": fields["num_attention_heads"]}
    for name, same in kind.attribute_map.items():
        if name in fields and same in fields:
            del fields[name]
    if given.get("layer_types"):
        kinds = list(dict.fromkeys(given["layer_types"]))
        fields["layer_types"] = (kinds * 2)[:2]
    return fields


def _random_model(family: str, head: Head, fields: dict[str, Any], labels: dict[str, int]) -> nn.Module:
    with torch.device("meta"):
        size = sum(
            one.numel() for one in HEADS[head].model_class.from_config(CONFIG_MAPPING[family](**fields)).parameters()
        )
    if size > MOST_PARAMETERS:
        raise CannotBuild(f"{size / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = build_from_scratch(family, fields, TOKENIZER, head, **labels)
    for parameter in model.parameters():  # biases and norms too: none may be neutral
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name or (name == "p")):
                setattr(module, name, 0.0)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
    return model


def _samples() -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    samples = [torch.randint(2, 250, (length,), generator=chance) for length in LENGTHS]
    for sample in samples:
        sample[sample == END] = 2
        sample[-1] = END  # BART classifies by it
    return samples


def _is_equal_padded(model: nn.Module, head: Head) -> bool:
    samples = _samples()
    targets = [sample[: len(sample) // 2] for sample in samples]
    return all(
        _is_close(alone, beside[: len(alone)] if head != "sequence_classification" else beside)
        for training in (True, False)
        for alone, beside in zip(
            (
                _logits(model.train(training), head, [one], [target])[0]
                for one, target in zip(samples, targets, strict=True)
            ),
            _logits(model.train(training), head, samples, targets),
            strict=True,
        )
    )


def _logits(model: nn.Module, head: Head, samples: list[Tensor], targets: list[Tensor]) -> Tensor:
    """As the tasks call a model: a causal one gets no mask, as it never looks at padding on the right."""
    inputs: dict[str, Any] = {"input_ids": _pad(samples)}
    if head != "causal_lm":
        inputs["attention_mask"] = _pad([torch.ones_like(sample) for sample in samples], 0)
    if head == "seq2seq":
        inputs["decoder_input_ids"] = _pad(targets)
    with torch.no_grad():
        logits: Tensor = model(**inputs, **({"use_cache": False} if head in ("causal_lm", "seq2seq") else {})).logits
    return logits


def _pad(rows: list[Tensor], value: int = PAD) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def _is_close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= 1e-4 * float(one.abs().max())


def _is_equal_text(model: nn.Module) -> bool:
    """Whether a prompt with padding on its left has the next logits, and then the text, that it has alone."""
    model.eval()
    prompts = [sample.tolist() for sample in _samples()]
    section = GenerationSection(max_new_tokens=WRITTEN, temperature=0)
    alone = [text for prompt in prompts for text in continuations(model, TOKENIZER, [prompt], PAD, section)]
    if continuations(model, TOKENIZER, prompts, PAD, section) != alone:
        raise AssertionError(f"the texts of {model.config.model_type} depend on those beside them")
    return pads_on_the_left(model, max(LENGTHS) + WRITTEN)


HEADER = """\
# Families

For each model family of transformers: does a sample give the same result in a batch as alone? Measured on tiny models
with random weights, in training and in evaluation mode, without dropout, with samples of {lengths} tokens.
`python docs/families.py` writes this page; `make test-all` measures it again.

- **equal**: the logits are the same to 1e-4 of the largest, or the greedy texts are the same.
- **one by one**: they are not, so drawbar makes micro-batches of one sample, and warns in training; texts, which are
  padded on the left, are generated one at a time.
- **refused**: drawbar does not compute rows of several samples (`data.batching: packed`, `data.padding_free: true`).

A model with longrope rotary embeddings (Phi-3 with 128 k positions) is computed one by one if `data.sequence_length` is
above its `original_max_position_embeddings`; with dynamic ones, texts end there.

Sampled texts (`temperature` above 0) draw from one stream of random numbers for all rows, so they depend on the batch.

| family | task | padded rows | packed and padding-free rows | texts |
| --- | --- | --- | --- | --- |
"""


def main() -> None:
    rows, untried, refused = [], [], []
    for family, head in cases():
        try:
            with quiet_transformers():
                rows.append(measure(family, head))
        except CannotBuild as error:
            untried.append(f"{family} ({TASKS[head]})")
            print(f"{family} ({head}): {str(error).splitlines()[0]:.150}", file=sys.stderr)
        except UserError:
            refused.append(family)
    PAGE.write_text(render(rows, untried, refused), encoding="utf-8")


def render(rows: list[Row], untried: list[str], refused: list[str]) -> str:
    table = "\n".join(row.line() for row in rows)
    lengths = f"{', '.join(map(str, LENGTHS[:-1]))} and {LENGTHS[-1]}"
    return (
        f"{HEADER.format(lengths=lengths)}{table}\n\n"
        f"Refused, because they are not causal language models: {', '.join(refused)}.\n\n"
        f"Not measured, because no tiny models of them take tokens alone: {', '.join(untried)}.\n"
    )


if __name__ == "__main__":
    main()
