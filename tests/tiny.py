"""A tiny language model behind a real engine, fed with token numbers: what the tests of engines and losses share."""

from typing import Any

import numpy as np
import torch

from drawbar.config.schema.run_config import CausalLMConfig, DataSection, OptimSection, RunConfig, TrainSection
from drawbar.data.dataset import Sample
from drawbar.data.loader import MicroBatch
from drawbar.data.packing import IGNORED_LABEL
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import assemble_engine
from drawbar.engines.engine import Engine
from drawbar.parallel.precision import choose_dtypes
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.task import Task

VOCABULARY = 257
LENGTH = 48
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "initializer_range": 0.2,  # far from uniform predictions: the gradients of two tokens must differ
    },
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": LENGTH,
        "initializer_range": 0.2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
CPU = torch.device("cpu")

torch.set_num_threads(1)  # tiny tensors: threads would only wait for one another, and for other programs


class Numbers(CausalLM):
    """causal_lm whose records are token numbers; the first ``context`` of them are no targets."""

    def build_tokenizer(self) -> Any:
        return train_byte_bpe([], VOCABULARY)

    def encode(self, record: dict[str, Any], train: bool) -> list[Sample]:
        tokens = np.asarray(record["tokens"], dtype=np.int32)
        labels = tokens.copy()
        labels[: record["context"]] = IGNORED_LABEL
        return [{"input_ids": tokens, "labels": labels}]


def tiny_config(family: str = "llama", fields: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """A configuration for :class:`Numbers`.

    Args:
        fields: of the architecture's own config, over those of ``ARCHITECTURES``.
        sections: of ``RunConfig``, over defaults that suit a test: fp32, a constant learning rate, no clipping.
    """
    defaults: dict[str, Any] = {
        "data": DataSection(sequence_length=LENGTH),
        "train": TrainSection(steps=10, gradient_clip=None),
        "optim": OptimSection(lr=1e-2, schedule="constant"),
        "precision": "fp32",
        "device": "cpu",
    }
    task = CausalLMConfig(model=family, from_scratch={**ARCHITECTURES[family], **(fields or {})})
    return RunConfig(task=task, **{**defaults, **sections})


def tiny_task(config: RunConfig) -> Numbers:
    return Numbers(config)


def tiny_engine(config: RunConfig, world: Distributed | None = None, seed: int = 0, total_steps: int = 10) -> Engine:
    """An engine whose weights depend on ``seed`` alone; by default one process on the CPU."""
    torch.manual_seed(seed)
    return unchecked_engine(tiny_task(config), config, world or Distributed(RankInfo(), CPU, timeout=60), total_steps)


def unchecked_engine(task: Task, config: RunConfig, world: Distributed, total_steps: int = 10) -> Engine:
    """An engine, whether or not the rules would let a user have it; ``auto`` is ``ddp``."""
    strategy = "ddp" if config.parallel.strategy == "auto" else config.parallel.strategy
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"strategy": strategy})})
    return assemble_engine(task, choose_dtypes(config, world.device), world, total_steps)


def random_batch(task: CausalLM, rows: int, seed: int) -> Batch:
    """``rows`` documents of 2 to 20 random tokens."""
    chance = np.random.default_rng(seed)
    samples = []
    for number in range(rows):
        tokens = chance.integers(VOCABULARY, size=chance.integers(2, 21), dtype=np.int32)
        samples.append({"input_ids": tokens, "labels": tokens, "id": number, "ids": [number]})
    return task.collate(samples)


def random_step(engine: Engine, seed: int, micro_batches: int = 2, rows: int = 2) -> list[MicroBatch[Batch]]:
    """What ``train_step`` takes; every rank may give another seed."""
    return [MicroBatch(random_batch(engine.task, rows, 1000 * seed + i)) for i in range(micro_batches)]


def vector(engine: Engine) -> torch.Tensor:
    """A copy of all weights in one row; tied ones once."""
    return torch.nn.utils.parameters_to_vector(engine.module.parameters()).detach().cpu().clone()
