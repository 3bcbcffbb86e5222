"""Batches on one CUDA device: pinned ahead of training, and copied beside the computation."""

import pytest
import torch

from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import TaskConfig
from drawbar.data.dataset import encode_records
from drawbar.data.loader import MicroBatchSize, SampleRows, TrainLoader
from drawbar.data.prefetch import MicroBatch
from drawbar.data.sampler import InOrder
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.device_copies import DeviceCopies
from drawbar.tasks.batch import Batch
from drawbar.tasks.task import Task
from drawbar.train.batches import make_prefetcher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)


def test_copies_are_whole_while_the_device_computes() -> None:
    """Each is read late, behind work that is queued, while the memory of those before it is free for others."""
    micro_batches = [MicroBatch(Batch({"x": torch.full((1 << 20,), float(i))}, [i]).pin_memory()) for i in range(20)]
    busy, sums = torch.randn(4096, 4096, device=CUDA), []
    for batch in DeviceCopies(CUDA).of(micro_batches):
        for _ in range(3):
            busy = (busy @ busy).clamp(-1, 1)
        sums.append(batch["x"].sum())
        del batch
    assert [float(found) for found in sums] == [float(i << 20) for i in range(20)]


@pytest.mark.parametrize("workers", ["auto", 1])
def test_batches_prepared_ahead_are_pinned(workers: str | int) -> None:
    config = RunConfig(task=TaskConfig(), data=DataSection(workers=workers))
    samples = SampleRows(encode_records([{"input_ids": [i]} for i in range(12)], lambda record: record, describe=str))
    loader = TrainLoader(
        samples,
        InOrder(12),
        global_batch=2,
        micro_batch=MicroBatchSize(rows=2),
        ranks=Distributed(RankInfo(), torch.device("cpu"), timeout=60).dp_ranks,
        prefetcher=make_prefetcher(Task(config), config, CUDA, prefetch=True),
    )
    batches = [micro.batch for _, micro_batches in loader.steps(0, 6) for micro in micro_batches]
    loader.close()
    assert all(batch["input_ids"].is_pinned() for batch in batches)
    assert torch.cat([batch["input_ids"] for batch in batches]).flatten().tolist() == list(range(12))
