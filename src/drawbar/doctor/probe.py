"""Facts that only torch knows, collected in a separate process: ``python -m drawbar.doctor.probe device|rendezvous``.

Prints one JSON object. A torch that cannot be imported, and a driver that hangs or crashes, end this process alone.
"""

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.errors import UserError
from drawbar.parallel.precision import choose_precision
from drawbar.util.dtypes import DTYPES

SIDE = 256
"""Of the matrices that are multiplied."""
RENDEZVOUS_SECONDS = 10
MESSAGE = 2**18
"""Numbers that are summed over two processes: 1 MiB."""


def inspect_device(wanted: str, precision: str, processes: int) -> dict[str, Any]:
    """Facts of torch and its devices, and one matrix product, computed on the chosen one.

    Args:
        processes: how many the run would start (``launch.nproc``; 1 for ``auto``), if no launcher has started several.
    """
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "errors": {},
    }
    try:
        rank_info = RankInfo.from_environment()
    except UserError as error:
        facts["errors"]["launcher"] = _told(error)
        rank_info = RankInfo()
    try:
        rank_info = (
            rank_info if rank_info.world_size > 1 else RankInfo(world_size=processes, local_world_size=processes)
        )
        device = choose_device(wanted, rank_info)
        facts["device"] = device.type
        facts["precision"] = choose_precision(precision, device)
        facts["product"] = _multiply(device, facts["precision"])
    except UserError as error:
        facts["errors"]["device"] = _told(error)
    return facts


def _told(error: UserError) -> list[str | None]:
    return [error.what, error.where, error.remedy]


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {"name": properties.name, "memory": total, "free": free}


def _multiply(device: torch.device, precision: str) -> dict[str, Any]:
    """A product of whole numbers that every format holds exactly, so that there is one right result."""
    dtype = DTYPES.get(precision, torch.float32)
    left = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    begin = time.perf_counter()
    total = float((left @ left).float().sum())
    return {"right": total == SIDE**3, "seconds": time.perf_counter() - begin}


def try_rendezvous() -> dict[str, Any]:
    """Two processes on this machine sum over gloo, as the ranks of a run do."""
    reader, writer = os.pipe()
    timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
    child = os.fork()  # before any thread is there; torch need not be imported again
    if child == 0:
        port = int(os.read(reader, 16) or b"0")
        _sum(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout), 1, timeout)
        os._exit(0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    os.write(writer, str(store.port).encode())
    found = _sum(store, 0, timeout)
    os.waitpid(child, 0)
    return found


def _sum(store: dist.Store, rank: int, timeout: timedelta) -> dict[str, Any]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    tensor = torch.full((MESSAGE,), float(rank + 1))
    dist.all_reduce(tensor)
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    seconds = time.perf_counter() - begin
    dist.barrier()
    dist.destroy_process_group()
    return {"right": bool((tensor == 6).all()), "seconds": seconds, "bytes": MESSAGE * 4}


if __name__ == "__main__":
    if sys.argv[1] == "rendezvous":
        print(json.dumps(try_rendezvous()))
    else:
        print(json.dumps(inspect_device(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
