"""Lightning's Trainer."""

import logging
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.recorder import Recorder, rank_and_size
from benchmarks.peers.workload import Settings, Workload


class Module(lightning.LightningModule):
    def __init__(self, workload: Workload, how: Settings) -> None:
        super().__init__()
        self.model = workload.model()
        if how.compiled:
            self.model.compile()
        self.workload, self.how = workload, how
        self.recorder = Recorder(workload)
        self.total: Any = 0.0
        self.found: dict[str, Any] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.workload.optimizer(self.model)

    def on_train_start(self) -> None:
        self.model.train()
        self.recorder.begin()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.total = self.total + loss.detach() / self.how.micro_batches
        return loss

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        """By torch: with a fused optimizer in mixed precision, Lightning refuses its own."""
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        if (number + 1) % self.how.micro_batches == 0:
            self.recorder.step(self.total)
            self.total = 0.0

    def on_train_end(self) -> None:
        """While the ranks can still add up their losses."""
        self.found = self.recorder.result()


def train(workload: Any, settings: Any, folder: str) -> dict[str, Any]:
    work, how = Workload.of(workload), Settings(**settings)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rank, world_size = rank_and_size()
    module = Module(work, how)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        precision="32-true" if how.precision == "fp32" else "bf16-mixed",
        max_steps=work.steps,
        accumulate_grad_batches=how.micro_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # its own shuffles
        default_root_dir=folder,
    )
    samples, size = work.samples(), work.rows // world_size // how.micro_batches
    sampler = DistributedSampler(samples, world_size, rank, shuffle=False)
    trainer.fit(module, DataLoader(samples, size, sampler=sampler, collate_fn=work.collate))
    return module.found
