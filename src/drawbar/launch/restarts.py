"""Runs at the beginning of a job, and of each restart of it: ends a crash loop.

    python -m drawbar.launch.restarts RUN_DIRECTORY JOB

Exit code 0: go on. 1: the job was restarted too often without a new checkpoint.
"""

import json
import os
import sys
from pathlib import Path

from drawbar.launch.job import FOLDER

MOST = 3
"""Restarts without progress."""


def newest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint; -1 where there is none."""
    names = [path.name.removeprefix("step-") for path in (run_dir / "checkpoints").glob("step-*")]
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def count_restart(run_dir: Path, job: str) -> int:
    """Count one more start of the job; how many restarts there were since the last one that had a newer checkpoint."""
    record = run_dir / FOLDER / f"restarts-{job}.json"
    step, restarts = newest_step(run_dir), 0
    if record.exists():
        last = json.loads(record.read_text())
        restarts = last["restarts"] + 1 if step <= last["step"] else 0
    record.parent.mkdir(parents=True, exist_ok=True)
    draft = record.with_suffix(".tmp")
    draft.write_text(json.dumps({"step": step, "restarts": restarts}))
    os.replace(draft, record)
    return restarts


def main(arguments: list[str]) -> int:
    run_dir, job = Path(arguments[0]), arguments[1]
    restarts = count_restart(run_dir, job)
    if restarts <= MOST:
        return 0
    print(f"error: job {job} was restarted {MOST} times without a new checkpoint; it ends here", file=sys.stderr)
    print("  fix:   find the reason above, then `drawbar submit` again; or save more often", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
