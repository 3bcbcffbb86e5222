"""The suite: ``python -m benchmarks`` measures everything, ``python -m benchmarks W1 W5`` these parts alone, and
``python -m benchmarks gpu`` what one hour on one GPU is for: see there, ``gpu --help``.

Prints tables, writes JSON to benchmarks/results, and draws growth to docs/performance; `make docs` makes
docs/performance.md of it.
"""

import argparse
import importlib
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.fresh_process import missing
from benchmarks.common.limits import describe_machine, measure_limits, versions
from benchmarks.common.options import Options
from benchmarks.common.report import PLOTS, RESULTS, Report, draw
from benchmarks.gpu import command as gpu

PARTS = {
    "W1": "w1_fixed_length",
    "W2": "w2_variable_length",
    "W2b": "w2b_translation",
    "W3": "w3_loss_head",
    "W4": "w4_optimizer",
    "W5": "w5_two_ranks",
    "W6": "w6_checkpoints",
    "W7": "w7_data",
    "W7b": "w7b_stall",
    "W8": "w8_start",
    "W9": "w9_evaluation",
    "W10": "w10_control_plane",
    "W11": "w11_faults",
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["gpu"]:
        return gpu.main(arguments[1:])
    options, parsed = parse(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="drawbar-bench-", dir=options.folder) as folder:
        options = replace(options, folder=Path(folder))
        limits = {} if options.quick else measure_limits(options.folder)
        failed = [part for part in parsed.parts or PARTS if not measure(part, options, limits, parsed.results)]
    return int(bool(failed))


def measure(part: str, options: Options, limits: dict[str, Any], results: Path | None) -> bool:
    """Measure a part, print it and write it; False where it failed, as the other parts are measured all the same."""
    start = time.perf_counter()
    try:
        report: Report = importlib.import_module(f"benchmarks.parts.{PARTS[part]}").measure(options)
    except Exception:  # noqa: BLE001 - whatever it is, it is shown
        print(f"{part} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return False
    print(report.to_text(), end="\n\n", flush=True)
    if results is not None:
        about: dict[str, Any] = {"machine": describe_machine(), "limits": limits, "versions": versions()}
        seconds = round(time.perf_counter() - start)
        about |= {"rounds": options.rounds, "seconds": seconds}
        print(f"written to {write(report, about, results)}", flush=True)
    return True


def parse(arguments: Sequence[str] | None) -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all")
    parser.add_argument("--rounds", type=int, default=5, help="of every contender, in turn (at least 5 to publish)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round, no JSON: does everything run?")
    parser.add_argument("--large", action="store_true", help="10⁹ tokens in W7, too: 15 GB of disk, 15 minutes more")
    parser.add_argument("--data", type=Path, help="folder with sst2/ and multi30k_en_de/; else they are downloaded")
    parser.add_argument(
        "--folder", type=Path, help="for files while measuring (default: the system's temporary folder)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    unknown = [part for part in parsed.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if parsed.quick:
        parsed.results, parsed.rounds = None, 1
    data = None if parsed.data is None else parsed.data.resolve()
    return Options(
        Path(parsed.folder or tempfile.gettempdir()), parsed.rounds, parsed.quick, parsed.large, data
    ), parsed


def write(report: Report, about: dict[str, Any], results: Path) -> Path:
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{report.part}.json"
    path.write_text(report.to_json(about), encoding="utf-8")
    if missing(["matplotlib"]):
        print("the plots are left as they were: matplotlib is not installed", file=sys.stderr)
        return path
    for curve in report.curves:
        draw(curve, PLOTS if results == RESULTS else results)
    return path


if __name__ == "__main__":
    sys.exit(main())
