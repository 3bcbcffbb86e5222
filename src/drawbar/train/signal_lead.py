"""Checks that a save takes less time than there is between the scheduler's signal and the job's time limit."""

import os
from collections.abc import Mapping

from drawbar.launch.job_files import SIGNAL_SECONDS
from drawbar.runtime.log import logger


class SignalLeadTime:
    """Warns once if a save takes longer than the time between the job's signal and its time limit.

    Args:
        environ: without ``SIGNAL_SECONDS`` in it, nothing is known of a time limit, and nothing is compared.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        seconds = environ.get(SIGNAL_SECONDS)
        self._seconds = None if seconds is None else float(seconds)

    def compare(self, save_seconds: float) -> None:
        """After each save.

        Args:
            save_seconds: from the beginning of the copy to host memory until the checkpoint was complete and on the
                disk. The wait for an earlier save is not in it.
        """
        if self._seconds is not None and save_seconds > self._seconds:
            logger.warning(
                "a save takes %.4g s until it is on the disk, and this job is told to save only %.4g s before its time "
                "limit: the steps after its last regular checkpoint would be lost. Set cluster.signal_seconds to more "
                "than %.4g: the step under way, and a save that has begun before, end first",
                save_seconds,
                self._seconds,
                2 * save_seconds,
            )
            self._seconds = None
