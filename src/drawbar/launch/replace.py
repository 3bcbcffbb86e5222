"""The old name of :mod:`drawbar.launch.node.entry.requeue`, for jobs that wait in a queue since an older version."""

import signal
import sys

from drawbar.launch.node.entry.requeue import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm ends what is left of the job as soon as it is requeued
    sys.exit(main(sys.argv[1:]))
