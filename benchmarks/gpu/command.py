"""One hour on one GPU: every case in processes of its own with a deadline, the most valuable first.

Each result is a line of JSON as soon as it is there: what is killed has lost nothing but what it was at. Tokens and
weights are random, and no network is needed. Without a GPU, it measures the CPU.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.fresh_process import Call, MeasurementFailed, TookTooLong, missing
from benchmarks.common.options import Run
from benchmarks.gpu.processes import choose_run
from benchmarks.gpu.setting import Place, Setting, among

CASES = {
    "probe": 60,
    "step": 520,
    "packed": 510,
    "head": 120,
    "optimizer": 180,
    "checkpointing": 320,
    "memory": 510,
    "save": 240,
    "lora": 510,
    "strategies": 280,
    "fp8": 300,
}
"""Modules of this package, the most valuable first; and the seconds after which each is ended."""
SHORTEST = 10.0
"""Seconds in which nothing can be measured."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where something failed that was not killed, skipped, refused or out of memory."""
    parsed = parse(arguments)
    if parsed.quick:
        # what is compiled runs as it is, as compiling takes minutes; on tiny tensors, threads wait for one another
        os.environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what measures now is ended, too
    lines = Lines(parsed.out)
    end = time.monotonic() + 60 * parsed.minutes
    run = choose_run()
    for name in parsed.cases or CASES:
        case, _, words = name.partition(":")
        with tempfile.TemporaryDirectory(prefix=f"drawbar-{case}-") as scratch:
            place = Place(parsed.quick, Path(scratch), parsed.out.resolve().parent)
            until = min(end, time.monotonic() + CASES[case])
            measure(case, place, run, until, lines, [word for word in words.split(",") if word])
    return int(lines.failed)


class Lines:
    """The file of results; what is measured again is added to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.failed = False

    def write(self, **values: Any) -> None:
        line = json.dumps(_rounded(values), ensure_ascii=False)
        self.failed |= "error" in values
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def measure(case: str, place: Place, run: Run, until: float, lines: Lines, words: Sequence[str] = ()) -> None:
    """Measure the settings of a case, one after another, until ``time.monotonic()`` is ``until``.

    Args:
        words: see :func:`among`.
    """
    module: Any = importlib.import_module(f"benchmarks.gpu.{case}")
    if hasattr(module, "REFERENCE"):
        lines.write(case=case, reference=module.REFERENCE)
    settings = module.settings(place)
    unknown = [word for word in words if not any(word in one.name for one in settings)]
    if unknown:
        known = "; ".join(one.name for one in settings)
        lines.write(case=case, error=f"no setting has {', '.join(unknown)} in its name; there are: {known}")
        return
    for setting in among(settings, words):
        about = {"case": case, "setting": setting.name}
        absent, left = missing(setting.needs), until - time.monotonic()
        if absent:
            lines.write(**about, skipped=f"{', '.join(absent)} is not installed")
        elif left < SHORTEST:
            lines.write(**about, skipped="no time was left")
        else:
            found = measure_one(setting, run, left)
            lines.write(**about, **found)
            if not setting.fails_alone and found.keys() & {"error", "killed"}:
                lines.write(case=case, setting="all others", skipped=f"they need {setting.name}")
                return


def measure_one(setting: Setting, run: Run, left: float) -> dict[str, Any]:
    """The result, or why there is none."""
    seconds = min(setting.seconds, left)
    arguments = {"function": setting.function, "arguments": setting.arguments}
    start = time.monotonic()
    try:
        found = run(Call("benchmarks.gpu.processes:guarded", arguments, timeout=seconds))
    except TookTooLong as error:
        return {"killed": f"after {seconds:.0f} s", "log": str(error)[-500:]}
    except MeasurementFailed as error:
        return {"error": str(error)[-2000:]}
    found.pop("spawned", None)
    return {**found, "seconds": time.monotonic() - start}


def _rounded(value: Any) -> Any:
    """Five digits are enough of everything, but of losses."""
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"{', '.join(CASES)}; step:drawbar,hand for some settings; default: all",
    )
    parser.add_argument("--minutes", type=minutes, default=9, help="for all cases together (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="lines are added (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.cases if name.partition(":")[0] not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    try:
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.open("a", encoding="utf-8").close()
    except OSError as error:
        parser.error(f"--out {parsed.out} cannot be written: {error}")
    return parsed


def minutes(written: str) -> float:
    if not 0 < float(written) < float("inf"):
        raise ValueError
    return float(written)


if __name__ == "__main__":
    sys.exit(main())
