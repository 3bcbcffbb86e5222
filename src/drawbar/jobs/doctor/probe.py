"""What only torch knows of this machine, asked in a separate process:
``python -m drawbar.jobs.doctor.probe DEVICE PRECISION PROCESSES`` prints one JSON object.

A torch that cannot be imported, and a driver that hangs or crashes, end only this process.
"""

import json
import sys
import warnings
from typing import Any

import torch

from drawbar.distributed.rank_info import RankInfo, choose_device
from drawbar.errors import UserError
from drawbar.parallel.precision import choose_precision
from drawbar.runtime.safetensors_reader import DTYPES


def look_at_torch(wanted: str, precision: str, processes: int) -> dict[str, Any]:
    """Facts of torch and its devices. One matrix product is computed on the chosen one: only then does torch
    notice that it lacks the kernels for a GPU.

    Args:
        wanted: the setting ``device``.
        precision: the setting.
        processes: how many the run would start (1 for ``launch.nproc=auto``), if no launcher has done so.
    """
    with warnings.catch_warnings(record=True) as told:  # such as that of a driver that is too old for this torch
        warnings.simplefilter("always")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "gpus": gpus,
        "reason": str(told[0].message).split(" (Triggered")[0] if told else "",
        "errors": {},
    }
    try:
        rank_info = RankInfo.from_environment()
    except UserError as error:
        facts["errors"]["launcher"] = {"what": error.what, "where": error.where, "remedy": error.remedy}
        rank_info = RankInfo()
    if rank_info.world_size == 1:
        rank_info = RankInfo(world_size=processes, local_world_size=processes)
    try:
        device = choose_device(wanted, rank_info)
        facts["device"] = device.type
        facts["precision"] = choose_precision(precision, device)
        matrix = torch.ones(256, 256, dtype=DTYPES.get(facts["precision"], torch.float32), device=device)
        (matrix @ matrix).sum().item()
    except UserError as error:
        facts["errors"]["device"] = {"what": error.what, "where": error.where, "remedy": error.remedy}
    except RuntimeError as error:
        remedy = "nvidia-smi must work; a torch that is too old for this GPU has no kernels for it"
        facts["errors"]["device"] = {"what": f"{wanted}: {str(error).splitlines()[0]}", "remedy": remedy}
    return facts


if __name__ == "__main__":
    print(json.dumps(look_at_torch(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
