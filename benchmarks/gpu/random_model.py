"""A Llama of random weights and rows of random words in a folder, from which every contender trains."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.peers.recorder import default_device
from benchmarks.peers.workload import IGNORED, Workload
from drawbar.models.model_flops import training_flops_per_token

MODEL = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
"""1.46 billion parameters."""
MODEL_8B = MODEL | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 128256,
}  # fmt: skip
"""The sizes of Llama 3 8B: 8.03 billion parameters."""
TINY = MODEL | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """The samples of a data set: rows of random words."""

    count: int
    longest: int
    shortest: int | None = None
    """Where lengths differ: they are spread evenly in logarithms, so that most are short."""

    def lengths(self) -> list[int]:
        if self.shortest is None:
            return [self.longest] * self.count
        ratio = self.longest / self.shortest
        found = [round(self.shortest * ratio ** (number / (self.count - 1))) for number in range(self.count)]
        random.Random(0).shuffle(found)
        return found


def sizes_of(quick: bool, large: bool = False) -> dict[str, Any]:
    return TINY if quick else MODEL_8B if large else MODEL


def prepare(folder: str, sizes: dict[str, Any], rows: Sequence[Any]) -> dict[str, Any]:
    """Write model, tokenizer and data.

    Args:
        rows: the values of a :class:`Rows`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    target, made = Path(folder), Rows(*rows)
    torch.manual_seed(0)
    with default_device():  # a billion random numbers take a CPU long
        model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=None))
    model.config.save_pretrained(target / "model")
    # the model's own save_pretrained imports accelerate, and that DeepSpeed, where it is: many seconds
    weights = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(weights, target / "model" / "model.safetensors", metadata={"format": "pt"})
    words = _write_tokenizer(target / "model", sizes["vocab_size"])
    generator, samples = torch.Generator().manual_seed(1), []
    with (target / "train.jsonl").open("w", encoding="utf-8") as file:
        for length in made.lengths():
            tokens = torch.randint(1, len(words), (length,), generator=generator)
            file.write(json.dumps({"text": " ".join(words[token] for token in tokens.tolist())}) + "\n")
            labels = tokens.clone()
            labels[0] = IGNORED  # nothing predicts it: those who divide by all labels must not count it
            samples.append({"input_ids": tokens, "labels": labels})
    torch.save(samples, target / "samples.pt")
    return {"parameters": sum(one.numel() for one in model.parameters()), "tokens": sum(made.lengths())}


def _write_tokenizer(folder: Path, vocabulary: int) -> list[str]:
    """A word for each token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [f"w{number}" for number in range(vocabulary)]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=words[0]).save_pretrained(folder)
    return words


@dataclass(frozen=True)
class RandomWorkload(Workload):
    """Every step trains on all rows of the folder, in whatever order: so losses agree without a common order."""

    lora: bool = False

    def model(self) -> Any:
        from transformers import LlamaForCausalLM

        if not self.lora:
            return LlamaForCausalLM.from_pretrained(self.model_path, dtype=torch.float32).train()
        from peft import LoraConfig, get_peft_model

        base = LlamaForCausalLM.from_pretrained(self.model_path, dtype=torch.bfloat16, device_map=None)
        return get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")).train()

    def samples(self) -> list[dict[str, Any]]:
        return torch.load(self.samples_path, weights_only=True) * self.steps


RANK = 8


def flops_per_token(model_path: Path, length: int, frozen: bool = False) -> float | None:
    """See ``training_flops_per_token``; rows are full, so each token counts as attending to a whole row."""
    from transformers import AutoConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(AutoConfig.from_pretrained(model_path))
    model.requires_grad_(not frozen)
    return training_flops_per_token(model, length)
