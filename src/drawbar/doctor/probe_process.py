"""Running :mod:`probe`, and what its answers mean."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from drawbar.doctor.finding import Finding, Fix, Level, problem_of, size
from drawbar.errors import UserError

TIMEOUT_SECONDS = 30.0
"""For importing torch on a busy machine; it usually takes 2."""
DEVICE = "Device"
_PLACE_IN_GLOO = re.compile(r"^.*\[enforce fail at [^\]]*\] (ifa != nullptr\. )?")
_DRIVER = "/proc/driver/nvidia/version"


@dataclass
class ProbeProcess:
    """A probe that runs. Its answer is asked for once."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    timeout: float
    begin: float

    def result(self) -> dict[str, Any]:
        """What the probe printed; ``{"error": …}`` where it did not come to that."""
        try:
            out, _ = self.process.communicate(timeout=max(0.1, self.begin + self.timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # and what it has forked
            self.process.communicate()
            return {"error": f"no answer after {self.timeout:.0f} s"}
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(ValueError, IndexError):
            return dict(json.loads(out.splitlines()[-1]))
        return {"error": self._last_error_line()}

    def _last_error_line(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        code = self.process.returncode
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return lines[-1][:300] if lines else ended


def start_probe(
    *arguments: str, environ: Mapping[str, str] = os.environ, timeout: float = TIMEOUT_SECONDS
) -> ProbeProcess:
    """Start a probe; several may run at once."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - the ProbeProcess keeps it until it ends
    process = subprocess.Popen(
        [sys.executable, "-m", "drawbar.doctor.probe", *arguments],
        env=dict(environ), stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
    )  # fmt: skip
    return ProbeProcess(process, errors, timeout, time.monotonic())


def driver_version(path: str = _DRIVER) -> str | None:
    """Of NVIDIA's kernel module; None where there is none."""
    try:
        words = Path(path).read_text().split("\n")[0].split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), "of unknown version")


def check_device(facts: Mapping[str, Any], driver: str | None, wanted: str, precision: str) -> Iterator[Finding]:
    """Args:
    facts: an answer of ``probe device``.
    wanted, precision: the settings ``device`` and ``precision``.
    """
    if "error" in facts:
        fix = Fix(f"{sys.executable} -c 'import torch; print(torch.zeros(1))'", "must work; else install torch anew")
        yield Finding(DEVICE, "torch", Level.PROBLEM, f"does not work: {facts['error']}", fix=fix)
        return
    yield from _build(facts, driver, wanted)
    for index, gpu in enumerate(facts["gpus"]):
        yield _gpu(index, gpu)
    if told := facts["errors"].get("device"):
        yield problem_of(DEVICE, "device", UserError(told[0], where=told[1], remedy=told[2]))
        return
    device = facts["device"]
    yield Finding(DEVICE, "device", Level.OK, device, _why_device(wanted, facts))
    yield Finding(DEVICE, "number format", Level.OK, *_format(facts["precision"], device, precision))
    product = facts["product"]
    if product["right"]:
        what = f"right, in {product['seconds'] * 1000:.0f} ms, the start-up of the device included"
        yield Finding(DEVICE, "a product", Level.OK, what)
    else:
        fix = Fix("nvidia-smi -q -d ECC,PAGE_RETIREMENT", "use another device, and have this one looked at")
        yield Finding(DEVICE, "a product", Level.PROBLEM, f"{device} multiplies wrongly", fix=fix)


def _build(facts: Mapping[str, Any], driver: str | None, wanted: str) -> Iterator[Finding]:
    of = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built for the CPU"
    nccl = f", NCCL {facts['nccl']}" if facts["nccl"] else ""
    with_driver = f", NVIDIA driver {driver}" if driver else ", no NVIDIA driver"
    what = f"torch {facts['torch']}, {of}{nccl}{with_driver}"
    if driver and not facts["gpus"] and wanted in ("auto", "cuda"):
        if facts["cuda"] is None:
            wheels = "https://download.pytorch.org/whl/cu126"
            command = f"{sys.executable} -m pip install --force-reinstall torch --index-url {wheels}"
            fix = Fix(command, "cu126 is a CUDA version: take one that the driver supports")
            yield Finding(DEVICE, "torch build", Level.WARNING, what, "this torch cannot use the GPU", fix)
        else:
            fix = Fix("nvidia-smi; unset CUDA_VISIBLE_DEVICES", "or install a torch built for this driver")
            yield Finding(DEVICE, "torch build", Level.WARNING, what, "torch sees none of its GPUs", fix)
    else:
        yield Finding(DEVICE, "torch build", Level.OK, what)


def _gpu(index: int, gpu: Mapping[str, Any]) -> Finding:
    what = f"{gpu['name']}, {size(gpu['memory'])}, {size(gpu['free'])} free"
    if gpu["free"] < 0.9 * gpu["memory"]:
        fix = Fix("nvidia-smi", "end what holds it, or choose other GPUs: export CUDA_VISIBLE_DEVICES=…")
        return Finding(DEVICE, f"GPU {index}", Level.WARNING, what, "others hold the rest", fix)
    return Finding(DEVICE, f"GPU {index}", Level.OK, what)


def _why_device(wanted: str, facts: Mapping[str, Any]) -> str:
    if wanted != "auto":
        return f"device={wanted}"
    if facts["device"] == "cpu":
        return "device=auto: torch sees no GPU"
    return f"device=auto: torch sees {len(facts['gpus']) or 'an Apple'} GPU{'s' * (len(facts['gpus']) > 1)}"


def _format(chosen: str, device: str, setting: str) -> tuple[str, str]:
    what = "fp32" if chosen == "fp32" else f"{chosen} products, fp32 weights and sums"
    if setting != "auto":
        return what, f"precision={setting}"
    why = f"this {device.upper()} has no bf16" if device == "cuda" else "bf16 is for GPUs that have it"
    return what, f"precision=auto: {why if chosen == 'fp32' else f'this {device.upper()} has bf16'}"


def check_rendezvous(facts: Mapping[str, Any]) -> Finding:
    """Args: facts: an answer of ``probe rendezvous``."""
    if "error" in facts or not facts["right"]:
        # gloo's own words come after the place in its source code
        reason = _PLACE_IN_GLOO.sub("", facts.get("error", "they came to a wrong sum"))
        fix = Fix(
            "unset GLOO_SOCKET_IFNAME; getent hosts $(hostname)", "there must be an address, open to this machine"
        )
        why = "every run of several processes needs it"
        return Finding("Network", "gloo", Level.PROBLEM, f"two processes here cannot meet: {reason}", why, fix)
    speed = 2 * facts["bytes"] / facts["seconds"]
    return Finding("Network", "gloo", Level.OK, "two processes here sum correctly", f"{size(speed)}/s")
