"""transformers' Trainer."""

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.recorder import Recorder, rank_and_size
from benchmarks.peers.workload import Settings, Workload


class InOrder(Trainer):
    """Visits the samples in their order, and gives each step's loss to a recorder."""

    recorder: Recorder
    grouped = False
    """Let Trainer choose the batches, of samples of similar length."""
    loss: Any = 0.0

    def _get_train_sampler(self, *arguments: Any, **options: Any) -> Any:
        if self.grouped:
            return super()._get_train_sampler(*arguments, **options)
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        loss = super().training_step(*arguments, **options)
        self.loss = self.loss + loss
        return loss


class RecordSteps(TrainerCallback):
    def __init__(self, trainer: InOrder) -> None:
        self.trainer = trainer

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        self.trainer.recorder.begin()

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.trainer.recorder.step(self.trainer.loss)
        self.trainer.loss = 0.0


def train(workload: Any, settings: Any, folder: str) -> dict[str, Any]:
    """Options: ``arguments`` (of TrainingArguments)."""
    work, how = Workload.of(workload), Settings(**settings)
    more = how.options.get("arguments", {})
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": work.steps,
        "per_device_train_batch_size": work.rows // rank_and_size()[1] // how.micro_batches,
        "gradient_accumulation_steps": how.micro_batches,
        "learning_rate": work.lr,
        "weight_decay": work.weight_decay,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "bf16": how.precision == "bf16",
        "torch_compile": how.compiled,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    grouped = "train_sampling_strategy" in more
    samples = work.samples()[: work.epoch_rows] if grouped else work.samples()
    made = TrainingArguments(**arguments | more)
    trainer = InOrder(work.model(), made, train_dataset=samples, data_collator=work.collate)
    trainer.recorder, trainer.grouped = Recorder(work), grouped
    trainer.add_callback(RecordSteps(trainer))
    trainer.train()
    return trainer.recorder.result(trainer.model)
