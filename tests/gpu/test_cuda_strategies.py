"""The strategies on CUDA, as far as one device goes: the losses of the plain engine on the same device.

fsdp and ddp at world size 1 do all that they do on many (gather, reduce, clip, save); only nothing travels.
"""

from typing import Any

import pytest
import torch

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import EveryKthBlock, OptimSection, ParallelSection, RunConfig
from drawbar.config.schema.task_sections import MaskedLMConfig
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import build_engine
from drawbar.tasks.masked_lm import MaskedLM
from drawbar.tasks.task_context import TaskContext
from harness import run_ranks
from tiny import random_step, tiny_config, tiny_task

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 6
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}
CASES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp without reshard": {"strategy": "fsdp", "reshard": False},
    "fsdp with offload": {"strategy": "fsdp", "offload": True},
    "full recomputation": {"strategy": "fsdp", "activation_checkpointing": "full"},
    "selective recomputation": {"strategy": "fsdp", "activation_checkpointing": "selective"},
    "recomputation without attention": {"strategy": "fsdp", "activation_checkpointing": "attention"},
    "every second block": {"strategy": "fsdp", "activation_checkpointing": EveryKthBlock(every=2)},
    **{f"deepspeed {stage}": {"strategy": "deepspeed", "zero_stage": stage} for stage in range(4)},
    "deepspeed 2 with offload": {"strategy": "deepspeed", "zero_stage": 2, "offload": True},
    "deepspeed 3 with offload": {"strategy": "deepspeed", "zero_stage": 3, "offload": True},
    "compile": {"strategy": "single", "compile": True},
    "compile and fsdp": {"strategy": "fsdp", "compile": True, "activation_checkpointing": "full"},
}


def configured(parallel: dict[str, Any], precision: str, **task: Any) -> RunConfig:
    config = tiny_config(
        optim=OptimSection(name="adamw", lr=0.01, eps=0.01, schedule="constant"),
        precision=precision,
        device="cuda",
        parallel=ParallelSection(**parallel),
    )
    return config.model_copy(update={"task": config.task.model_copy(update=task)})


def trace(config: RunConfig, world: Distributed) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and the weights after them."""
    torch.manual_seed(0)
    engine = build_engine(tiny_task(config), config, world, total_steps=STEPS)
    losses = [float(engine.train_step(random_step(engine, seed=1)).loss) for _ in range(STEPS)]
    weights = dict(engine.state().model)
    engine.close()
    return losses, weights


def on_one_gpu(parallel: dict[str, Any], precision: str, **task: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = configured(parallel, precision, **task)
    with Distributed(RankInfo(), torch.device("cuda", 0), 120, ParallelDims.of(config.parallel, 1)) as world:
        return trace(config, world)


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_one_gpu(name: str, precision: str) -> None:
    wanted, wanted_weights = on_one_gpu({"strategy": "single"}, "fp32")
    found, weights = on_one_gpu(CASES[name], precision)
    assert wanted[-1] < wanted[0] - 0.1
    tolerance = TOLERANCES[precision]
    assert found == pytest.approx(wanted, rel=tolerance)
    for key, tensor in wanted_weights.items():
        assert torch.linalg.norm(weights[key] - tensor) <= 2 * tolerance * torch.linalg.norm(tensor), key


def test_offloaded_parameters_leave_the_buffers_on_the_gpu() -> None:
    """GPT-2 has none, BERT's embeddings have two."""
    config = configured({"strategy": "fsdp", "offload": True}, "fp32")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    run_config = config.model_copy(update={"task": MaskedLMConfig(model="bert", from_scratch=sizes)})
    task = MaskedLM(TaskContext(run_config, train_byte_bpe([], 300, MaskedLM.special_tokens)))
    with Distributed(RankInfo(), torch.device("cuda", 0), 120, ParallelDims.of(config.parallel, 1)) as world:
        engine = build_engine(task, task.run_config, world, total_steps=STEPS)
        assert {buffer.device.type for buffer in engine.module.buffers()} == {"cuda"}
        assert {parameter.device.type for parameter in engine.module.parameters()} == {"cpu"}
        samples = task.encode({"text": "the load and the engine"}, train=False)
        rows = [{**sample, "id": 0, "ids": [0]} for sample in samples]
        assert engine.eval_step(task.collate(rows)).loss >= 0
        engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_loss_scale_of_deepspeed_is_resumed(stage: int) -> None:
    """The first steps overflow, until the scale fits; what it came to is part of the state."""
    config = configured({"strategy": "deepspeed", "zero_stage": stage}, "fp16")
    values = []
    with Distributed(RankInfo(), torch.device("cuda", 0), 120, ParallelDims.of(config.parallel, 1)) as world:
        for _ in range(2):
            engine = build_engine(tiny_task(config), config, world, total_steps=STEPS)
            if values:
                engine.load(values[-1])
            else:
                for _ in range(STEPS):
                    engine.train_step(random_step(engine, seed=1))
            values.append(engine.state())
            engine.close()
    assert values[0].values["scaler"]["scale"] > 0
    assert values[1].values == values[0].values


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_attention(attention: str) -> None:
    wanted, _ = on_one_gpu({"strategy": "single"}, "fp32")
    found, _ = on_one_gpu({"strategy": "fsdp"}, "bf16", attention=attention)
    assert found == pytest.approx(wanted, rel=TOLERANCES["bf16"])


def test_flash_attention() -> None:
    pytest.importorskip("flash_attn")
    wanted, _ = on_one_gpu({"strategy": "single"}, "fp32")
    found, _ = on_one_gpu({"strategy": "single"}, "bf16", attention="flash_attention_2")
    assert found == pytest.approx(wanted, rel=TOLERANCES["bf16"])


TWO_GPUS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp with offload": {"strategy": "fsdp", "offload": True},
    "tensor": {"strategy": "ddp", "tensor": 2},
    "deepspeed 2": {"strategy": "deepspeed", "zero_stage": 2},
    "deepspeed 3": {"strategy": "deepspeed", "zero_stage": 3},
    "deepspeed and tensor": {"strategy": "deepspeed", "zero_stage": 1, "tensor": 2},
}


def on_two_gpus() -> dict[str, list[float]]:
    found = {}
    for name, parallel in TWO_GPUS.items():
        place = RankInfo.from_environment()
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        config = configured(parallel, "fp32")
        with Distributed(place, device, 120, ParallelDims.of(config.parallel, 2)) as world:
            found[name] = trace(config, world)[0]
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus() -> None:
    """Both ranks read the same rows here, so the mean loss is that of one."""
    wanted, _ = on_one_gpu({"strategy": "single"}, "fp32")
    for losses in run_ranks(on_two_gpus, 2)[0].values():
        assert losses == pytest.approx(wanted, rel=TOLERANCES["fp32"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_data_parallel_in_one_process(precision: str) -> None:
    wanted, _ = on_one_gpu({"strategy": "single"}, precision)
    found, _ = on_one_gpu({"strategy": "dp"}, precision)
    assert found == pytest.approx(wanted, rel=TOLERANCES[precision])
