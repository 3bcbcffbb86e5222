"""The models that the presets in configs/ name, without the Hub: their sizes, as their config.json has them there."""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.models.heads import HEADS

CONFIGS = Path(__file__).parents[1] / "configs"
PRESETS = sorted(CONFIGS.glob("*.yaml"))
_NAME = re.compile(r"(?P<run>\w+?_(?:(?P<size>[\d.]+[mb])|\w+))_(?:(?P<nodes>\d)x)?(?P<gpus>\d)x(?P<gb>\d+)gb")

_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
HUB: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": {
        **_QWEN, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-32B": {
        **_QWEN, "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-72B": {
        **_QWEN, "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "FacebookAI/roberta-large": {
        "model_type": "roberta", "vocab_size": 50265, "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 514, "type_vocab_size": 1,
    },
    "google-t5/t5-base": {
        "model_type": "t5", "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12,
        "num_decoder_layers": 12, "num_heads": 12, "decoder_start_token_id": 0,
    },
}  # fmt: skip


def named(preset: Path) -> dict[str, str]:
    """What the name of a preset says."""
    found = _NAME.fullmatch(preset.stem)
    assert found is not None, preset.stem
    return {name: text for name, text in found.groupdict().items() if text is not None}


def model_config(config: RunConfig) -> PreTrainedConfig:
    """The architecture of a preset."""
    task: Any = config.task
    if task.from_scratch is None:
        fields = dict(HUB[task.model])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    sizes = {} if isinstance(task.tokenizer, str) else {"vocab_size": task.tokenizer.vocab_size, "pad_token_id": 0}
    return AutoConfig.for_model(task.model, **sizes, **task.from_scratch)


def meta_model(config: RunConfig) -> nn.Module:
    """The model of a preset, without memory."""
    with torch.device("meta"):
        return HEADS[config.task.type].model_class.from_config(model_config(config), dtype=torch.float32)


def state_bytes(config: RunConfig, gpus: int) -> float:
    """Weights, gradients and AdamW's moments on one of ``gpus`` GPUs: fp32, but bf16 for the frozen linear layers
    under LoRA."""
    model = meta_model(config)
    shards = gpus // config.parallel.replicate if config.parallel.features.shards_parameters else 1
    sizes = {id(p): p.numel() for p in model.parameters()}
    if config.lora is None:
        return 16 * sum(sizes.values()) / shards
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    low = {id(p): p.numel() for layer in linear.values() for p in layer.parameters()}
    frozen = 4 * sum(sizes.values()) - 2 * sum(low.values())
    adapted = [layer for name, layer in linear.items() if name != "lm_head"]
    trained = sum(config.lora.rank * (layer.in_features + layer.out_features) for layer in adapted)
    return (frozen + 16 * trained) / shards


def shown(size: float) -> str:
    """Two digits, in GB of 10⁹ bytes."""
    return f"{size / 1e9:.{max(0, 1 - math.floor(math.log10(size / 1e9)))}f} GB"


_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""Fields of a configuration that say how many blocks a model has; all of them, as its encoder and decoder are alike."""


def with_layers(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """A configuration of a model of so many blocks."""
    kept = {name: value for name, value in fields.items() if name != "layer_types"}
    return kept | {name: layers for name in kept if name in _LAYERS}


def number_of_layers(config: RunConfig) -> int:
    return next(int(value) for name, value in model_config(config).to_dict().items() if name in _LAYERS)


def write_stand_in(config: RunConfig, folder: Path, layers: int) -> list[str]:
    """What a preset takes from the Hub, made up in ``folder``: configuration and tokenizer of its model, and a few
    records.

    Returns:
        The settings that name them, and a model of so many blocks, for commands that need no weights.
    """
    tokenizer = train_byte_bpe([], 257)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    said = "the driver couples the load to the engine"
    chat = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    words = {"text": said, "sentence": said, "premise": said, "hypothesis": said, "messages": chat}
    records = [{**words, "translation": {"en": said, "de": said}, "label": number % 3} for number in range(12)]
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    data = [f"data.train={file}", f"data.validation={file}", "data.validation_share=null", "data.test=null"]
    task: Any = config.task
    if task.from_scratch is not None:
        smaller = f"task.from_scratch={json.dumps(with_layers(task.from_scratch, layers))}"
        return [*data, smaller, *([f"task.tokenizer={folder}"] if isinstance(task.tokenizer, str) else [])]
    sizes = with_layers(model_config(config).to_dict(), layers)
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    return [*data, f"task.model={folder}", f"task.tokenizer={folder}"]
