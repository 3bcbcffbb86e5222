"""What ``drawbar plan`` says that a run takes, beside what torch and nvidia-smi say that it took."""

from typing import Any

import drawbar
from benchmarks.gpu.processes import may_have_gpus
from benchmarks.gpu.random_model import RandomWorkload
from benchmarks.gpu.setting import Place, Setting
from benchmarks.gpu.step import rows_of, training
from benchmarks.peers.of_drawbar import overrides
from benchmarks.peers.workload import Settings

SETTINGS = {
    "as it is": [],
    "selective checkpointing": ["parallel.activation_checkpointing=selective"],
    "full checkpointing": ["parallel.activation_checkpointing=full"],
    "plain loss": ["task.cross_entropy=plain"],
    "moments in bf16": ["optim.state_dtype=bf16"],
    "fp32": ["precision=fp32"],
    "fsdp": ["parallel.strategy=fsdp"],
    "one row": ["train.micro_batch=1"],
    "micro_batch=auto": ["train.micro_batch=auto"],
}


def settings(place: Place) -> list[Setting]:
    made = [rows_of(place, "prepare")]
    for name, more in SETTINGS.items():
        trained = training(place, name, more)
        made.append(Setting(name, "benchmarks.gpu.memory:beside_plan", trained.arguments))
    return [*made[:2], made[-1]] if place.quick else made


def beside_plan(**arguments: Any) -> dict[str, Any]:
    """The forecast first: it forks, which a process that uses a GPU had better not."""
    from benchmarks.gpu.training import train

    planned = plan(
        arguments["folder"], arguments["rows"], arguments["length"], arguments["settings"], arguments["more"]
    )
    found = train(**arguments)
    taken = found["allocated_gib"]
    return {"planned_gib": planned, "planned_by_measured": None if taken is None else planned / taken, **found}


def plan(folder: str, rows: int, length: int, settings: dict[str, Any], more: list[str]) -> float:
    """GiB at the peak of the same run."""
    from drawbar.plan.machine import make_machine
    from drawbar.plan.run_forecast import Forecaster
    from drawbar.tasks.task_registry import task_class

    data = [f"data.train={folder}/train.jsonl", f"data.sequence_length={length}"]
    work = RandomWorkload(folder, "causal_lm", rows, 10, 1, data)
    how = Settings(**{"options": {"overrides": more}, **settings})
    config = drawbar.load_config(None, overrides(work, how, folder)).config
    # an H100's memory is named, so that this process does not ask the GPU
    gpus, gib = (1, 80 * 2**30) if may_have_gpus() else (None, None)
    machine = make_machine(config, None, gpus, gib, None, 0.4)
    forecaster = Forecaster(config, task_class(config.task.type), machine, None)
    return forecaster.forecast(config, "run").largest.peak.bytes / 2**30
