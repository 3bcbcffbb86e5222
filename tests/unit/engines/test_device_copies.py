import torch

from drawbar.data.prefetch import MicroBatch
from drawbar.engines.device_copies import DeviceCopies
from drawbar.tasks.batch import Batch
from tiny import CPU


def test_every_micro_batch_in_order() -> None:
    micro_batches = [MicroBatch(Batch({"x": torch.tensor([number])}, [number])) for number in range(3)]
    assert [int(batch["x"]) for batch in DeviceCopies(CPU).of(micro_batches)] == [0, 1, 2]
    assert list(DeviceCopies(CPU).of([])) == []
