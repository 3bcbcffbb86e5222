"""The loop that people write with torch alone: forward, loss, backward, clip, step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.recorder import Recorder, rank_and_size
from benchmarks.peers.workload import Settings, Workload, loss_sum


def train(workload: Any, settings: Any, folder: str) -> dict[str, Any]:
    """Options: ``alone`` (ranks do not talk: what the same work takes without communication)."""
    work, how = Workload.of(workload), Settings(**settings)
    rank, world_size = rank_and_size()
    recorder = Recorder(work)
    device = recorder.device
    alone = how.options.get("alone", False)
    if world_size > 1 and not alone:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = wrap(work.model().to(device), "single" if alone else how.strategy)
    if how.compiled:
        model.compile()
    optimizer = work.optimizer(model)
    talking = 1 if alone else world_size
    recorder.begin()
    for batches, targets in zip(work.step_batches(how.micro_batches, rank, world_size), work.targets(), strict=True):
        total = torch.zeros((), device=device)
        for number, cpu_batch in enumerate(batches):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in cpu_batch.items()}
            labels = batch.pop("labels")
            with reduce_only_last(model, number == len(batches) - 1):
                with autocast(how.precision, device):
                    logits = model(**batch, **({} if work.task == "sequence_classification" else {"use_cache": False}))
                    loss = loss_sum(work.task, logits.logits, labels)
                (loss * talking / targets).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.step(total * world_size / targets)
    found = recorder.result(model)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def wrap(model: nn.Module, strategy: str) -> nn.Module:
    """The model, replicated or sharded."""
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if strategy == "fsdp":
        for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block)
        fully_shard(model)
    return model


def reduce_only_last(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients travel in the last micro-batch alone."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if hasattr(model, "no_sync") and not last else nullcontext()


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, torch.bfloat16)
