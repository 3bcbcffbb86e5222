"""Checks the correctness and speed of an all-reduce over all nodes before training, and names faulty nodes."""

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError
from drawbar.launch.findings import record_bad_nodes
from drawbar.runtime.log import logger

SECONDS = 60.0
_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}
"""Size of the summed tensor: large enough to be limited by the network alone, small enough to take only a moment."""
_POLL = 0.02


def check_allreduce(world: Distributed, run_dir: Path, seconds: float = SECONDS) -> None:
    """If the ranks are on several nodes, sum a tensor over all of them, and log how fast each node was.

    Raises:
        UserError: with exit code 1: the sum is wrong, or took longer than ``seconds``; the error names the nodes.
    """
    if not world.rank_info.spans_nodes:
        return
    world.store.set(f"allreduce/{world.rank}", "")  # tells the other ranks that this rank takes part
    found: list[tuple[list[int], float]] = []
    failures: list[Exception] = []

    def work() -> None:
        try:
            found.append(_sum_twice(world))
        except Exception as error:  # noqa: BLE001 - raised below, in the main thread
            failures.append(error)

    # in a thread, as NCCL blocks if it cannot connect, and then ignores timeouts
    thread = threading.Thread(target=work, name="first sum", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive():
        if time.monotonic() > end:
            raise _no_sum(world, run_dir, seconds)
        thread.join(_POLL)
    if failures:
        raise failures[0]
    results = world.gather(found[0])
    reasons = world.from_rank0(lambda: _judge(results or [], world.nodes), "judging the first sum")
    if reasons:
        if world.is_rank0:
            _record(run_dir, reasons)
        raise UserError(
            "\n".join(["a sum over all nodes is wrong:", *reasons.values()]),
            remedy=f"have {', '.join(reasons)} checked (memory, GPU, network card), and exclude it until then: "
            f"cluster.options={{exclude: '{','.join(reasons)}'}}",
            exit_code=ExitCode.FAILED,
        )
    if results is not None:
        logger.info("%s", _describe(results, world.nodes, world.device.type))


def _sum_twice(world: Distributed) -> tuple[list[int], float]:
    """The ranks whose slice of the sum is wrong here, and the bytes per second that this rank sent (as many as it
    received).

    Every rank fills its own slice, and adds zeros to the others' slices, so that a wrong slice reveals its rank.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # each thread has its own current device
    numbers = max(1, _BYTES.get(world.device.type, _BYTES["cpu"]) // 4 // world.size)
    slices = torch.zeros(world.size, numbers, device=world.device)
    slices[world.rank] = world.rank + 1.0
    dist.all_reduce(slices)
    expected = torch.arange(1.0, world.size + 1, device=world.device).unsqueeze(1)
    wrong = (slices != expected).any(dim=1).nonzero().flatten().tolist()
    begin = time.perf_counter()
    dist.all_reduce(slices)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return wrong, 2 * (world.size - 1) / world.size * slices.numel() * 4 / seconds


def _judge(results: Sequence[tuple[list[int], float]], nodes: Sequence[str]) -> dict[str, str]:
    """Find the fault of each node. A slice that most ranks found wrong was sent wrong; else it was received wrong.

    Args:
        results: what ``_sum_twice`` returned on each rank.
        nodes: the node of each rank.
    """
    reasons: dict[str, str] = {}
    finders = Counter(source for wrong, _ in results for source in wrong)
    sent_wrong = {source for source, count in finders.items() if 2 * count > len(results)}
    for source in sorted(sent_wrong):
        reasons[nodes[source]] = f"rank {source} on {nodes[source]} sends wrong numbers"
    for rank, (wrong, _) in enumerate(results):
        if set(wrong) - sent_wrong:
            reasons.setdefault(nodes[rank], f"rank {rank} on {nodes[rank]} receives wrong numbers")
    return reasons


def _describe(results: Sequence[tuple[list[int], float]], nodes: Sequence[str], device: str) -> str:
    slowest: dict[str, float] = {}
    for (_, speed), node in zip(results, nodes, strict=True):
        slowest[node] = min(speed, slowest.get(node, speed))
    speeds = ", ".join(f"{node} {speed / 1e9:.2f} GB/s" for node, speed in slowest.items())
    return f"a sum over {len(slowest)} nodes is right ({device}): {speeds}"


def _no_sum(world: Distributed, run_dir: Path, seconds: float) -> UserError:
    missing = [rank for rank in range(world.size) if not world.store.check([f"allreduce/{rank}"])]
    others = [rank for rank in range(world.size) if rank not in missing]
    if not missing:
        return UserError(
            f"a sum over the nodes {', '.join(dict.fromkeys(world.nodes))} did not end within {seconds:.0f} s",
            where=f"rank {world.rank} on {world.nodes[world.rank]}",
            remedy="all ranks take part, but their data does not get through: set cluster.interface to a network that "
            "all nodes are on; with GPUs try NCCL_DEBUG=INFO, and NCCL_IB_DISABLE=1 (cluster.environment)",
            exit_code=ExitCode.FAILED,
        )
    reasons = {
        world.nodes[rank]: f"rank {rank} on {world.nodes[rank]} did not take part in a sum within {seconds:.0f} s"
        for rank in reversed(missing)
    }
    if world.rank == others[0]:
        _record(run_dir, reasons)
    return UserError(
        "\n".join(reasons.values()),
        where=f"rank {world.rank} on {world.nodes[world.rank]}",
        remedy=f"look at the log of {', '.join(reasons)}: does its process hang, or its GPU?",
        exit_code=ExitCode.FAILED,
    )


def _record(run_dir: Path, reasons: dict[str, str]) -> None:
    launch_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if launch_id is not None:  # otherwise another launcher started this rank, and nobody would read the record
        record_bad_nodes(run_dir, launch_id, reasons)
