"""Context parallelism: sequences cut over ranks give the loss and the gradients of one process.

On a CPU, with the kernel of plain attention (:mod:`ring_on_cpu`): the ring itself, the cutting and the sums are the
real ones.
"""

from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import OptimSection, ParallelSection, RunConfig
from drawbar.data.loader import MicroBatch
from drawbar.distributed.device_mesh import build_mesh
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.parallel.context import FAMILIES, ContextParallel, check_context
from drawbar.tasks.batch import Batch
from exhaustive import asked, evenly, params
from harness import run_ranks
from ring_on_cpu import teach_cpu
from step_operators import watch_device
from tiny import ARCHITECTURES, CPU, random_batch, tiny_config, tiny_engine, tiny_task

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"max_position_embeddings": 48, "initializer_range": 0.2, "attention_dropout": 0.0}
GROUPED = {**SMALL, "num_key_value_heads": 2}
FIELDS: dict[str, dict[str, Any]] = {
    "gemma": {**GROUPED, "head_dim": 4},
    "gpt2": ARCHITECTURES["gpt2"],
    "gpt_neox": {**SMALL, "hidden_dropout": 0.0},
    "granite": GROUPED,
    "llama": ARCHITECTURES["llama"],
    "mistral": {**GROUPED, "sliding_window": None},
    "mixtral": {**GROUPED, "sliding_window": None, "num_local_experts": 2},
    "olmo2": GROUPED,
    "phi": {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 4},
    "smollm3": GROUPED,
    "starcoder2": {**GROUPED, "sliding_window": None, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}
REPLICATED = {f"{family} replicated": (family, {"strategy": "ddp"}) for family in sorted(FAMILIES)}
TWO = REPLICATED | {
    "llama in shards": ("llama", {"strategy": "fsdp"}),
    "gpt2 in shards": ("gpt2", {"strategy": "fsdp"}),
    "llama computed again": ("llama", {"strategy": "fsdp", "activation_checkpointing": "full"}),
    "llama computed again in part": ("llama", {"strategy": "ddp", "activation_checkpointing": "selective"}),
}
FOUR = {
    "llama, two sequences, replicated": ("llama", {"strategy": "ddp"}),
    "llama, two sequences, in shards": ("llama", {"strategy": "fsdp"}),
    "llama, two sequences, shards and replicas": ("llama", {"strategy": "fsdp", "replicate": 2}),
    "llama over four ranks": ("llama", {"strategy": "fsdp", "context": 4}),
    "llama with tensor parallelism": ("llama", {"strategy": "ddp", "tensor": 2}),
    "llama with tensor parallelism, in shards": ("llama", {"strategy": "fsdp", "tensor": 2}),
}
OFTEN = {
    *evenly(REPLICATED, 2),
    "gpt2 in shards",
    "llama computed again in part",
    "llama, two sequences, shards and replicas",
    "llama with tensor parallelism, in shards",
}


def configured(family: str, parallel: dict[str, Any]) -> RunConfig:
    optim = OptimSection(name="sgd", lr=1.0, weight_decay=0.0, schedule="constant")
    config = tiny_config("llama", optim=optim, parallel=ParallelSection(**parallel))
    task = config.task.model_copy(update={"model": family, "from_scratch": FIELDS[family]})
    return config.model_copy(update={"task": task})


def micro_batches(config: RunConfig, dp_rank: int, data_ranks: int) -> list[MicroBatch[Batch]]:
    """This rank's of four micro-batches of different lengths: the second with a mask, the last as padding."""
    task = tiny_task(config)
    batches = [random_batch(task, rows=3, seed=seed) for seed in range(4)]
    batches[1]["attention_mask"] = (batches[1]["labels"] >= 0).long()
    return [MicroBatch(batch, is_padding=index >= 3) for index, batch in enumerate(batches)][dp_rank::data_ranks]


def one_step(config: RunConfig, world: Distributed) -> dict[str, Any]:
    """Loss, weight, gradients and norm of one step, and the loss of an evaluation after it."""
    engine = tiny_engine(config, world)
    gradients: dict[str, torch.Tensor] = {}
    engine.updater.optimizers[0].register_step_pre_hook(lambda *_: gradients.update(engine.gradients()))
    before = engine.module.config._attn_implementation
    operators = watch_device(engine)
    result = engine.train_step(micro_batches(config, world.dp_ranks.rank, world.dp_ranks.size))
    evaluated = engine.eval_step(random_batch(engine.task, rows=2, seed=9))
    assert engine.module.config._attn_implementation == before
    engine.close()
    return {
        "loss": float(result.loss),
        "weight": result.num_targets,
        "norm": float(result.grad_norm),
        "gradients": {name: gradient.numpy() for name, gradient in gradients.items()},
        "evaluated": (float(evaluated.loss), evaluated.num_targets),
        "reads": dict(operators.reads),
    }


def on_ranks(cases: dict[str, tuple[str, dict[str, Any]]], size: int) -> dict[str, dict[str, Any]]:
    teach_cpu()
    configs = {name: configured(family, {"context": 2, **parallel}) for name, (family, parallel) in cases.items()}
    found = {}
    for dims, names in groupby(configs, lambda name: ParallelDims.of(configs[name].parallel, size)):
        with Distributed(RankInfo.from_environment(), CPU, 60, dims) as world:  # to join takes longer than most steps
            found |= {name: one_step(configs[name], world) for name in names}
    return found


def in_one_process(family: str) -> dict[str, Any]:
    return one_step(configured(family, {"strategy": "single"}), Distributed(RankInfo(), CPU, timeout=60))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    names = asked(request, "name")
    two, four = ({name: cases[name] for name in names if name in cases} for cases in (TWO, FOUR))
    return run_ranks(on_ranks, 2, two, 2)[0] | run_ranks(on_ranks, 4, four, 4)[0]


@pytest.mark.parametrize("name", params([*TWO, *FOUR], OFTEN))
def test_losses_and_gradients_are_those_of_one_process(found: dict[str, dict[str, Any]], name: str) -> None:
    wanted = in_one_process((TWO | FOUR)[name][0])
    assert not found[name]["reads"]
    assert found[name]["weight"] == wanted["weight"]
    assert found[name]["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found[name]["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
    assert found[name]["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)
    assert found[name]["gradients"].keys() == wanted["gradients"].keys()
    for key, gradient in wanted["gradients"].items():
        assert np.linalg.norm(found[name]["gradients"][key] - gradient) <= 1e-5 * np.linalg.norm(gradient), key


def refused(model: str = "llama", **fields: Any) -> str:
    """What is said of a model that cannot be cut."""
    config = configured("llama", {"strategy": "single"})
    task = config.task.model_copy(update={"model": model, "from_scratch": {**FIELDS.get(model, {}), **fields}})
    built = tiny_task(config.model_copy(update={"task": task})).build_model()
    with pytest.raises(UserError) as error:
        ContextParallel(built, None, -100)
    return str(error.value)


def test_other_devices_and_targets_are_refused() -> None:
    with pytest.raises(UserError, match="no context parallelism for cpu devices, only for cuda"):
        check_context(CPU, "next_token")
    with pytest.raises(UserError, match="only tasks that predict the next token"):
        check_context(torch.device("cuda"), "token")
    check_context(torch.device("cuda"), "next_token")


def test_models_that_cannot_be_cut_are_refused() -> None:
    assert "a bloom model cannot be cut" in refused("bloom", hidden_size=16, n_layer=1, n_head=2)
    assert "layers of sliding_attention" in refused("mistral", sliding_window=8)
    layers = ["full_attention", "sliding_attention"]
    assert "layers of sliding_attention" in refused("qwen2", layer_types=layers, use_sliding_window=True)


def test_a_piece_goes_with_what_follows_it() -> None:
    """Seven tokens over two ranks: four pieces of two, of which each rank has one from each end."""
    pieces = run_ranks(pieces_of_a_row, 2)
    assert [piece["input_ids"] for piece in pieces] == [[[10, 11, 16, 0]], [[12, 13, 14, 15]]]
    assert [piece["position_ids"] for piece in pieces] == [[[0, 1, 6, 6]], [[2, 3, 4, 5]]]
    assert [piece["labels"] for piece in pieces] == [[[-100, 11, 12, -100, -100]], [[-100, 13, 14, 15, 16]]]
    for piece in pieces:
        assert "no attention mask, so padding must be on the right" in piece["left"]
        assert "fields that context parallelism cannot cut: weights" in piece["unknown"]
        assert "ring attention has no dropout" in piece["dropout"]


def pieces_of_a_row() -> dict[str, Any]:
    teach_cpu()
    dims = ParallelDims(cp=2)
    with Distributed(RankInfo.from_environment(), CPU, 60, dims) as world:
        model = tiny_task(configured("llama", {})).build_model().train()
        parallel = ContextParallel(model, build_mesh(dims, world.device)["cp"], -100)
        row = torch.arange(10, 17)[None]
        batch = {"input_ids": row, "labels": row}
        found: dict[str, Any] = {name: tensor.tolist() for name, tensor in parallel.cut(batch).items()}
        for name, field in {"left": "attention_mask", "unknown": "weights"}.items():
            with pytest.raises(UserError) as error:
                parallel.cut({**batch, field: (row > 10).long()})
            found[name] = str(error.value)
        for block in model.model.layers:
            block.self_attn.attention_dropout = 0.1
        piece = parallel.cut(batch)
        with pytest.raises(UserError) as error, parallel.ring():
            model(input_ids=piece["input_ids"], position_ids=piece["position_ids"])
        assert model.config._attn_implementation == "sdpa"
        return {**found, "dropout": str(error.value)}
