"""The card of an exported model (``README.md``): what it is, how it was trained, and what it scored.

It is written to be published: it says nothing of where files lie on the machine that trained.
"""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from drawbar.config.schema.run_config import RunConfig
from drawbar.models.folder import SOURCE_FILE, initial_model_of

PIPELINES = {
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "seq2seq": "text2text-generation",
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
}
"""``task.type`` → the Hub's ``pipeline_tag`` of such a model."""
_TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

{{ kind }}, trained with drawbar {{ version }}.

| | |
| --- | --- |
{% for what, value in facts.items() -%}
| {{ what }} | {{ value }} |
{% endfor %}
{%- if scores %}
## Evaluation

After step {{ step }}:

| score | |
| --- | ---: |
{% for what, value in scores.items() -%}
| {{ what }} | {{ value }} |
{% endfor %}
{%- endif %}"""


def model_card(config: RunConfig, model: nn.Module, step: int, dtype: str, adapters: bool) -> ModelCard:
    """The card of the checkpoint of ``step``.

    Args:
        model: only its class and the shapes of its parameters are used.
        dtype: of the exported weights.
        adapters: whether the adapters of a LoRA run are exported, and not the whole model.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    copied = initial_model_of(config.run_dir, config.task)
    named = getattr(config.task, "model", None) if copied is None else None
    base = _published_name(named, getattr(config.task, "from_scratch", None))
    data = ModelCardData(
        base_model=base,
        library_name="peft" if adapters else "transformers",
        pipeline_tag=PIPELINES.get(config.task.type),
        tags=["drawbar"],
    )
    train, optim, packed = config.train, config.optim, config.data.batching == "packed"
    facts = {
        "model": f"{type(model).__name__}, {parameters:,} parameters",
        **({"trained from": base} if base else {}),
        **({} if copied is None else {"trained from": _other_run(copied)}),
        "weights": f"{dtype}{', LoRA adapters alone' if adapters else ''}",
        "checkpoint": f"step {step:,}",
        "packed rows in a step" if packed else "samples in a step": f"{train.global_batch:,}",
        "tokens of a sample, at most": f"{config.data.sequence_length:,}",
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, schedule {optim.schedule}",
        "seed": config.run.seed,
    }
    return ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        name=_cell(config.run.name),
        kind="LoRA adapters" if adapters else "A model",
        version=version("drawbar"),
        step=f"{step:,}",
        facts={what: _cell(value) for what, value in facts.items()},
        scores={_cell(what): _cell(value) for what, value in _scores(config.run_dir, step).items()},
    )


def _other_run(copied: Path) -> str:
    """Names the run that the initial model was copied from, and its step. The path of that run is left out: cards are
    published."""
    source = json.loads((copied / SOURCE_FILE).read_text("utf-8"))
    return f"the run {Path(source['run']).name}, step {source['step']:,}"


def _published_name(model: Any, from_scratch: Any) -> str | None:
    """The name of the base model on the Hub; None for a local folder, or a model that is trained from scratch."""
    is_hub_name = isinstance(model, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) and not Path(model).exists()
    return model if is_hub_name and from_scratch is None else None


def _scores(run_dir: Path, step: int) -> dict[str, str]:
    """Name → score of the evaluation after ``step``; empty if there was none."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    scores: dict[str, str] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # cut off when the run was killed
            continue
        if isinstance(entry, dict) and entry.get("step") == step:
            found = {name.removeprefix("eval/"): value for name, value in entry.items() if name.startswith("eval/")}
            scores |= {name: f"{value:.4g}" for name, value in found.items() if isinstance(value, int | float)}
    return scores


def _cell(value: Any) -> str:
    """The value as text for a cell of a Markdown table, with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(str(value).split()))
