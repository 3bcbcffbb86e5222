"""Runs at the beginning of a Slurm job, and of each restart of it: ends a crash loop.

    python -m drawbar.jobs.node.restart RUN_DIRECTORY JOB

Exit code 0: continue. 1: the job was restarted too often without a new checkpoint.
"""

import json
import sys
from pathlib import Path

from drawbar.util.atomic_files import write_atomically
from drawbar.util.run_dir import LAUNCH_FOLDER, newest_step

MOST_RESTARTS = 3
"""Restarts without progress."""


def count_restart(run_dir: Path, job: str) -> int:
    """Count one more start of the job. Returns how many restarts in a row, up to this one, found no new checkpoint."""
    record = run_dir / LAUNCH_FOLDER / f"restarts-{job}.json"
    step, restarts = newest_step(run_dir), 0
    if record.exists():
        last = json.loads(record.read_text())
        restarts = last["restarts"] + 1 if step <= last["step"] else 0
    write_atomically(record, json.dumps({"step": step, "restarts": restarts}).encode())
    return restarts


def main(arguments: list[str]) -> int:
    run_dir, job = Path(arguments[0]), arguments[1]
    restarts = count_restart(run_dir, job)
    if restarts <= MOST_RESTARTS:
        return 0
    print(
        f"error: job {job} was restarted {MOST_RESTARTS} times without a new checkpoint; it ends here", file=sys.stderr
    )
    print(
        "  fix:   find the reason above, then `drawbar submit` again; where each start was told to save before it had "
        "begun, set a longer cluster.time or fewer cluster.signal_seconds; else save more often",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
