"""Replicas in one process compute in the run's dtype. (``tests/gpu`` has them on two GPUs.)"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from drawbar.parallel.ddp import DataParallel
from drawbar.parallel.precision import autocast
from tiny import CPU


def threads_as_torch_starts_them(
    replicas: Sequence[Callable[..., Any]], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]], devices: Any
) -> list[Any]:
    """torch's ``parallel_apply``, which refuses CPUs: autocast is on in the threads if it is here, in its default."""
    outputs: dict[int, Any] = {}
    enabled = torch.is_autocast_enabled("cpu")

    def work(number: int) -> None:
        with torch.amp.autocast("cpu", enabled=enabled):
            outputs[number] = replicas[number](*inputs[number], **kwargs[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outputs[number] for number in range(len(replicas))]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_replicas_compute_in_the_format_of_the_run(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of the threads' own autocast is another one than the run's in one case at least: fp16 on GPUs, bf16
    on CPUs."""
    monkeypatch.setattr(sys.modules[torch.nn.DataParallel.__module__], "parallel_apply", threads_as_torch_starts_them)
    linear = torch.nn.Linear(4, 4)
    model = DataParallel(linear, precision, CPU)
    with autocast(precision, CPU):
        outputs = model.parallel_apply([linear, linear], [(torch.ones(2, 4),)] * 2, [{}, {}])
    assert [output.dtype for output in outputs] == [dtype, dtype]
