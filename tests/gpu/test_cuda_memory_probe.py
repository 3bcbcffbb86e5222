"""``train.micro_batch: auto`` on a CUDA device: what is found fits, is nearly all that fits, and is kept."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from drawbar.train import prepare
from drawbar.train.memory_probe import MICRO_BATCH_FILE, USABLE_SHARE, CudaMemory
from runs import Fit, losses, metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RUN = (
    *("device=cuda", "train.micro_batch=auto", "train.global_batch=128", "train.steps=4"),
    *("eval.every=null", "checkpoint.every=2"),
)
ROOM = 4 * 2**20
"""Bytes that a step may take besides what it takes with one row."""


class SmallDevice(CudaMemory):
    """A device with ``ROOM``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.peaks: list[int] = []

    def peak(self) -> int:
        # of tensors alone: torch reserves 20 MiB at once, more than all that this model takes
        self.peaks.append(torch.cuda.max_memory_allocated(self._device))
        return self.peaks[-1]

    def limit(self) -> int:
        return int((self.peaks[0] + ROOM) / USABLE_SHARE)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_found_fits_and_is_kept(precision: str, fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SmallDevice(torch.device("cuda", 0))
    monkeypatch.setattr(prepare, "memory_of", lambda _: device)
    fit(*RUN, f"precision={precision}")
    assert 1 < len(device.peaks) < 8  # more than a row, and less than all 128
    peak = next(line["train/peak_memory_gib"] for line in metrics(run) if line["step"] == 4) * 2**30
    assert peak <= device.limit()
    whole, tried = losses(run), len(device.peaks)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    fit(*RUN, f"precision={precision}")
    assert losses(run) == whole
    assert len(device.peaks) == tried


def test_a_whole_device_takes_a_small_batch_at_once(fit: Fit, run: Path) -> None:
    fit(*RUN)
    assert json.loads((run / MICRO_BATCH_FILE).read_text())["tokens"] == 128 * 32
