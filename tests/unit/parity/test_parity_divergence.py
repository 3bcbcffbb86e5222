"""What flows through the modules: each micro-batch's is kept apart, and a rank's part is found in the whole."""

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.parity.divergence import pieces, record_step
from drawbar.parity.workload import Workload
from drawbar.tasks.batch import Batch
from tiny import CPU, Numbers, random_step, tiny_config, tiny_engine, tiny_task

WHOLE = torch.arange(2 * 12 * 24.0).reshape(2, 12, 24)


def is_found(part: torch.Tensor) -> bool:
    return any(torch.equal(part, piece) for piece in pieces(WHOLE, part.shape))


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_a_rank(rank: int) -> None:
    assert is_found(WHOLE)
    assert is_found(WHOLE.chunk(2, 2)[rank])
    assert is_found(WHOLE.chunk(2, 1)[rank])
    assert is_found(WHOLE.chunk(2, 2)[rank].chunk(3, 1)[1])
    of_three = torch.cat([layer.chunk(2, 2)[rank] for layer in WHOLE.chunk(3, 2)], 2)
    assert is_found(of_three)
    ends = WHOLE.chunk(4, 1)
    assert is_found(torch.cat([ends[rank], ends[3 - rank]], 1))
    assert is_found(WHOLE.chunk(5, 2)[4 * rank])  # the last of parts of different sizes is smaller


class Twice(Numbers):
    """Calls its model twice for each batch, once by one of its modules."""

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        model.get_submodule("model")(**batch.inputs)
        return super().forward(model, batch)


def test_each_micro_batch_is_recorded_by_itself() -> None:
    config = tiny_config()
    world = Distributed(RankInfo(), CPU, 60)
    engine = tiny_engine(config)
    one, other = random_step(engine, seed=1)
    workload = Workload(config, Twice, steps=1, tokenizer=tiny_task(config).tokenizer)
    found = record_step(workload, config, world, [[one, other], [other, one], [one]])
    first, second, third = found.records
    assert {"model.embed_tokens#0#0", "model.embed_tokens#1#0", "lm_head#0#0"} <= first.outputs.keys()
    assert not {"model.embed_tokens#2#0", "lm_head#1#0"} & first.outputs.keys()
    for kind, expected in (("outputs", first.outputs), ("gradients", first.gradients)):
        same, differing = getattr(third, kind), getattr(second, kind)
        assert expected.keys() == same.keys() == differing.keys()
        assert expected
        assert all(torch.equal(same[key], tensor) for key, tensor in expected.items())
    assert not torch.equal(second.outputs["lm_head#0#0"], first.outputs["lm_head#0#0"])


def test_recording_leaves_the_gradients_as_they_are() -> None:
    config = tiny_config()
    world = Distributed(RankInfo(), CPU, 60)
    workload = Workload(config, Numbers, steps=1, tokenizer=tiny_task(config).tokenizer)
    engine = workload.engine(config, world, workload.steps)
    micro_batches = random_step(engine, seed=1, micro_batches=3)
    kept: dict[str, torch.Tensor] = {}
    with closing(engine), engine.inspecting(lambda: kept.update(engine.gradients())):
        engine.train_step(micro_batches)
    found = record_step(workload, config, world, [micro_batches])
    assert found.gradients.keys() == kept.keys()
    assert all(torch.equal(found.gradients[name], gradient) for name, gradient in kept.items())


def test_what_is_no_part() -> None:
    assert not is_found(WHOLE + 1)
    assert not is_found(WHOLE.chunk(2, 2)[0] * 2)
    assert not is_found(WHOLE[:, :, ::2])
    assert not is_found(WHOLE[0])
    assert not is_found(torch.zeros(2, 12, 25))
    assert not is_found(torch.zeros(2, 0, 24))
