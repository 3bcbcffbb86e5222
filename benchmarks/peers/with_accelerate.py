"""A loop with Accelerate, as its documentation writes it."""

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.peers.recorder import Recorder, rank_and_size
from benchmarks.peers.workload import Settings, Workload


def train(workload: Any, settings: Any, folder: str) -> dict[str, Any]:
    work, how = Workload.of(workload), Settings(**settings)
    accelerator = Accelerator(
        mixed_precision="no" if how.precision == "fp32" else how.precision,
        gradient_accumulation_steps=how.micro_batches,
        cpu=not torch.cuda.is_available(),
    )
    model = work.model()
    if how.compiled:
        model.compile()
    size = work.rows // rank_and_size()[1] // how.micro_batches
    model, optimizer, loader = accelerator.prepare(
        model, work.optimizer(model), DataLoader(work.samples(), size, collate_fn=work.collate)
    )
    recorder, total = Recorder(work), 0.0
    recorder.begin()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total = total + loss.detach() / how.micro_batches
        if accelerator.sync_gradients:
            recorder.step(total)
            total = 0.0
        if recorder.steps == work.steps:
            break
    return recorder.result()
