"""Which of the planted faults do the tests notice?

    python tests/mutants/run.py [--only TEXT]... [--jobs N] [--tests PATH]... [--minutes N]

Each fault of ``faults.yaml`` is planted in a copy of ``src/``, and the tests that are named beside it run with that
copy, up to the first that fails: those of ``make test``, and, where they all pass, those of ``make exhaustive``. The
tests have to pass without a fault: what fails anyway kills all of them. A test that is skipped here, for want of a GPU
or of Slurm, notices nothing.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from faults import ROOT, SOURCE, Fault, Stale, all_faults

KILLED, KILLED_LATER, SURVIVED, STALE, TIMED_OUT = "killed", "exhaustive", "SURVIVED", "stale", "timed out"
NOTICED = (KILLED, KILLED_LATER, TIMED_OUT)
"""A suite that hangs does not pass either."""
MARKS = {"not exhaustive": KILLED, "exhaustive": KILLED_LATER}
"""By what pytest's ``-m`` selects, ``make test`` and ``make exhaustive``: what a test of it makes of a fault."""
PASSED, FAILED, INTERRUPTED, NO_TESTS = 0, 1, 2, 5
"""Exit codes of pytest; the third is that of tests that cannot be imported, too."""
SECONDS_TO_END = 60


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    verdict: str
    detail: str
    """The first test that failed, or why none could."""
    seconds: float


def try_fault(fault: Fault, tests: Sequence[str], limit: float) -> Outcome:
    """Plant a fault, and run the tests."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drawbar-fault-") as name:
        source = Path(name) / "src"
        try:
            planted = fault.planted(SOURCE)
            shutil.copytree(SOURCE, source)
            (source / "drawbar" / fault.file).write_text(planted, "utf-8")
            verdict, detail = run_tests(source, Path(name) / "tests", tests, limit)
        except Stale as error:
            verdict, detail = STALE, str(error)
    return Outcome(fault, verdict, detail, time.monotonic() - begin)


def run_tests(source: Path, folder: Path, tests: Sequence[str], limit: float) -> tuple[str, str]:
    """Run tests with the code in ``source``: a verdict, and what it rests on. Raises Stale where there is no test."""
    environment = {**os.environ, "PYTHONPATH": str(source)}  # what the tests start finds it, too
    check_is_imported(source, environment)
    survived = ""
    for selected, verdict in MARKS.items():
        pytest = [sys.executable, "-m", "pytest", "-m", selected, "-x", "-q", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*pytest, f"--basetemp={folder}", *tests],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            end(process)
            return TIMED_OUT, f"after {limit:.0f} s"
        if process.returncode in (FAILED, INTERRUPTED):
            found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
            return verdict, found[1] if found else output.strip()[-500:]
        if process.returncode not in (PASSED, NO_TESTS):
            raise Stale(f"its tests cannot be run: {output.strip()[-500:]}")
        survived = output.strip().splitlines()[-1]
    return SURVIVED, survived


def check_is_imported(source: Path, environment: dict[str, str]) -> None:
    """The copy comes before the installed package, also where that is a link to ``src/``."""
    where = "import drawbar; print(drawbar.__file__)"
    done = subprocess.run([sys.executable, "-c", where], cwd=ROOT, env=environment, capture_output=True, text=True)
    # an error of its own is one that the tests will meet
    if done.returncode == 0 and not Path(done.stdout.strip()).is_relative_to(source):
        raise SystemExit(f"tests would import {done.stdout.strip()}, and not the copy in {source}")


def end(process: "subprocess.Popen[str]") -> None:
    """As by Ctrl-C: pytest then ends what its tests have started."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def summary(outcomes: Sequence[Outcome]) -> str:
    """By area: how many of how many are noticed."""
    total = Counter(outcome.fault.area for outcome in outcomes)
    often = Counter(outcome.fault.area for outcome in outcomes if outcome.verdict == KILLED)
    noticed = Counter(outcome.fault.area for outcome in outcomes if outcome.verdict in NOTICED)
    rows = [
        f"{area:14} {often[area]:3} by `make test`, {noticed[area]:3} by all tests, of {count}"
        for area, count in total.items()
    ]
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    counts = ", ".join(
        f"{verdicts[one]} {one}" for one in (KILLED, KILLED_LATER, TIMED_OUT, SURVIVED, STALE) if verdicts[one]
    )
    return "\n".join([*rows, f"{len(outcomes)} faults: {counts}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TEXT", help="faults whose names have this text")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults that are tried at once")
    parser.add_argument("--tests", action="append", metavar="PATH", help="run these for every fault, not its own")
    parser.add_argument("--minutes", type=float, default=30, metavar="N", help="the most for the tests of one fault")
    arguments = parser.parse_args()
    chosen = [fault for fault in all_faults() if any(text in fault.name for text in arguments.only or [""])]
    if not chosen:
        parser.error("no fault has such a name")
    outcomes = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        limit = 60 * arguments.minutes
        begun = [pool.submit(try_fault, fault, arguments.tests or fault.tests, limit) for fault in chosen]
        for future in as_completed(begun):
            outcome = future.result()
            outcomes.append(outcome)
            print(f"{outcome.verdict:10} {outcome.seconds:5.0f} s  {outcome.fault.name}: {outcome.detail}", flush=True)
    print(summary(sorted(outcomes, key=lambda outcome: chosen.index(outcome.fault))))
    sys.exit(any(outcome.verdict not in NOTICED for outcome in outcomes))


if __name__ == "__main__":
    main()
