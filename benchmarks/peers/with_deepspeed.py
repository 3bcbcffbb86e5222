"""DeepSpeed's engine, with the optimizer that the others have."""

import os
from typing import Any

import torch

from benchmarks.peers.recorder import Recorder, rank_and_size
from benchmarks.peers.workload import Settings, Workload


def train(workload: Any, settings: Any, folder: str) -> dict[str, Any]:
    work, how = Workload.of(workload), Settings(**settings)
    rank, world_size = rank_and_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("MASTER_PORT", "29511")
    import deepspeed

    model = work.model()
    if how.compiled:
        model.compile()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.rows // world_size // how.micro_batches,
        "gradient_accumulation_steps": how.micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(how.strategy[4:]) if how.strategy.startswith("zero") else 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if how.precision == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=work.optimizer(model), config=config)
    recorder = Recorder(work)
    recorder.begin()
    for batches in work.step_batches(how.micro_batches, rank, world_size):
        total = torch.zeros((), device=recorder.device)
        for batch in batches:
            loss = engine(**{name: tensor.to(recorder.device) for name, tensor in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batches)
        recorder.step(total)
    return recorder.result()
