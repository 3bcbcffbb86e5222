"""What the doctor says of a real GPU."""

import os

import pytest
import torch

from drawbar.jobs.doctor import findings
from drawbar.jobs.doctor.examine import ask_torch
from drawbar.launch.findings import Level, look_at_gpus, of_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_gpu() -> None:
    facts, gpus = ask_torch("auto", "auto", 1), look_at_gpus(os.environ)
    assert facts["device"] == "cuda"
    assert facts["gpus"] == torch.cuda.device_count()
    assert gpus.driver
    assert [found for found in findings.of_torch(facts, gpus, "auto") if found.level is not Level.OK] == []


def test_more_processes_than_gpus() -> None:
    place = {"RANK": "99", "WORLD_SIZE": "100", "LOCAL_RANK": "99", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    facts = ask_torch("cuda", "auto", 1, environ={**os.environ, **place})
    assert "GPUs are visible" in facts["errors"]["device"]["what"]


def test_a_gpu_whose_memory_somebody_holds() -> None:
    free, total = torch.cuda.mem_get_info(0)
    held = torch.empty(min(free - 2**30, total // 5), dtype=torch.uint8, device="cuda:0")
    found = list(of_gpus(look_at_gpus(os.environ)))
    assert held.numel()
    assert Level.WARNING in [finding.level for finding in found]
