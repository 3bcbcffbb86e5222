"""The first sum over several nodes: real ranks of gloo on two made-up nodes."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.distributed.watchdog import NODE
from drawbar.errors import UserError
from drawbar.launch.allreduce_check import _judge, check_allreduce
from drawbar.runtime.log import logger
from harness import run_ranks


def look(fault: str, folder: str) -> dict[str, Any]:
    """What one of three ranks, each on a node of its own, gets to know. Rank 1 is the one at fault."""
    place = RankInfo.from_environment()
    rank = place.rank
    os.environ[NODE] = f"n{rank + 1}"
    os.environ["TORCHELASTIC_RUN_ID"] = "drawbar-7"
    place = RankInfo(rank, place.world_size, 0, 1)
    said: list[str] = []
    logger.setLevel("INFO")
    logger.info = lambda message, *values: said.append(message % values)  # type: ignore[method-assign]
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if fault == "sends" and rank == 1 and tensor.dim() == 2:
            tensor[1, 7] += 0.5
        result = original(tensor, *arguments, **options)
        if fault == "receives" and rank == 1 and tensor.dim() == 2:
            tensor[2, 7] += 0.5
        return result

    dist.all_reduce = all_reduce
    world = Distributed(place, torch.device("cpu"), 30).__enter__()
    begin = time.monotonic()
    try:
        if fault == "absent" and rank == 1:
            world._watchdog.stop()  # the others will leave first
            time.sleep(6)
        else:
            check_allreduce(world, Path(folder), 2.0 if fault == "absent" else 60.0)
    except UserError as error:
        return {"error": str(error), "code": int(error.exit_code), "seconds": time.monotonic() - begin}
    return {"said": said, "nodes": world.nodes}


@pytest.mark.exhaustive
def test_a_sum_that_is_right(tmp_path: Path) -> None:
    first, *others = run_ranks(look, 3, "none", str(tmp_path))
    assert first["nodes"] == ("n1", "n2", "n3")
    assert len(first["said"]) == 1
    assert first["said"][0].startswith("a sum over 3 nodes is right (cpu): n1 ")
    assert all(f"n{node} " in first["said"][0] for node in (1, 2, 3))
    assert [other["said"] for other in others] == [[], []]
    assert not (tmp_path / "launch").exists()


@pytest.mark.exhaustive
def test_the_node_at_fault_is_named(tmp_path: Path) -> None:
    for fault, says in {
        "sends": "rank 1 on n2 sends wrong numbers",
        "receives": "rank 1 on n2 receives wrong numbers",
        "absent": "rank 1 on n2 did not take part in a sum within 2 s",
    }.items():
        folder = tmp_path / fault
        found = run_ranks(look, 3, fault, str(folder))
        told = [found[0], found[2]] if fault == "absent" else found
        for answer in told:
            assert says in answer["error"]
            assert "fix:" in answer["error"]
            assert answer["code"] == 1
        assert json.loads((folder / "launch" / "bad-nodes.json").read_text())[0]["nodes"] == {"n2": says}


def test_who_is_to_blame() -> None:
    nodes = ["n1", "n1", "n2", "n2"]
    assert _judge([([], 1.0)] * 4, nodes) == {}
    assert _judge([([3], 1.0)] * 4, nodes) == {"n2": "rank 3 on n2 sends wrong numbers"}
    assert _judge([([2, 3], 1.0), ([], 1.0), ([], 1.0), ([], 1.0)], nodes) == {
        "n1": "rank 0 on n1 receives wrong numbers"
    }
