"""Runs at the end of a failed Slurm job: where the job has named bad nodes, puts it back into the queue
without them (``exclude``), or only if one of them was lost (``only-if-lost``).

    python -m drawbar.jobs.node.requeue RUN_DIRECTORY JOB exclude|only-if-lost

See :func:`drawbar.jobs.slurm.bad_node_requeue.requeue`, whose result is the exit code.
"""

import signal
import sys
from pathlib import Path

from drawbar.jobs.slurm.bad_node_requeue import requeue


def main(arguments: list[str]) -> int:
    run_dir, job, mode = arguments
    return requeue(Path(run_dir), job, mode)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm ends what is left of the job as soon as it is requeued
    sys.exit(main(sys.argv[1:]))
