"""What the doctor says of a real GPU."""

import pytest
import torch

from drawbar.doctor.finding import Level
from drawbar.doctor.probe_process import check_device, driver_version, start_probe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_gpu() -> None:
    facts = start_probe("device", "auto", "auto", "1").result()
    assert facts["device"] == "cuda"
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["nccl"]
    assert facts["product"]["right"] is True
    assert driver_version() is not None
    assert not [
        found for found in check_device(facts, driver_version(), "auto", "auto") if found.level is Level.PROBLEM
    ]


def test_more_processes_than_gpus() -> None:
    place = {"RANK": "99", "WORLD_SIZE": "100", "LOCAL_RANK": "99", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(name, value)
        facts = start_probe("device", "cuda", "auto", "1").result()
    assert "GPUs are visible" in facts["errors"]["device"][0]


def test_a_gpu_whose_memory_somebody_holds() -> None:
    free, total = torch.cuda.mem_get_info(0)
    held = torch.empty(min(free - 2**30, total // 5), dtype=torch.uint8, device="cuda:0")
    facts = start_probe("device", "auto", "auto", "1").result()
    levels = {found.name: found.level for found in check_device(facts, driver_version(), "auto", "auto")}
    assert held.numel()
    assert levels["GPU 0"] is Level.WARNING
