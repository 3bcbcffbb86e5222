"""``Launcher``: the interface to whatever runs jobs elsewhere, such as a scheduler, for the commands about jobs.

A launcher is one class in one file, and an entry point of the group ``drawbar.launchers``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drawbar.config.schema.run_config import RunConfig
from drawbar.jobs.job import Job, make_job
from drawbar.jobs.records import JobRecord, JobStatus
from drawbar.jobs.settings import ClusterSection


@dataclass(frozen=True)
class ResolvedCluster:
    """The section ``cluster`` with what the launcher has filled in, as a job uses it."""

    cluster: ClusterSection
    notes: tuple[str, ...] = ()
    """What the user should know before the job is submitted."""


@dataclass(frozen=True)
class Submitted:
    """A job that has been handed over, or is about to run from this process."""

    number: str
    """The launcher's job id, which commands such as ``drawbar cancel`` take."""
    run_here: Callable[[Callable[[], None]], int] | None = None
    """Given only if this process must stay while the job runs: runs the job, calls its argument once the job has begun,
    and returns the job's exit code."""


class Launcher(ABC):
    """Runs jobs elsewhere. From ``logs`` on, methods have defaults."""

    has_sweeps = False
    """Whether it takes jobs with ``elements``."""
    has_snapshots = False
    """Whether its jobs can use a copy of the user's code."""
    takes_hosts = False
    """Whether the machines are named one by one (``--hosts``), and not only counted (``--nodes``)."""
    one_machine = False
    """Whether all processes of a job run on one machine: a job on several nodes is then refused."""
    shares_disk = True
    """Whether the nodes see the files that are here, so that data and run directory can be checked."""

    @abstractmethod
    def render(self, job: Job) -> str:
        """The job as human-readable text: ``submit`` is given this text, and ``--dry-run`` prints it.

        Raises:
            UserError: the launcher cannot express something of it.
        """

    @abstractmethod
    def submit(self, job: Job, script: str) -> Submitted:
        """Hand the job over.

        Args:
            script: what ``render`` returned. It is kept in ``job.folder``.

        Raises:
            UserError: it is refused.
        """

    @abstractmethod
    def status(self, records: Sequence[JobRecord]) -> list[JobStatus]:
        """The status of these jobs, in their order.

        Raises:
            UserError: it cannot be known now.
        """

    @abstractmethod
    def cancel(self, jobs: Sequence[JobStatus], grace: float) -> None:
        """End jobs that wait or run, and return when they have ended.

        Args:
            grace: seconds that running jobs have to save, before they are killed.

        Raises:
            UserError: the launcher refuses.
        """

    def logs(self, record: JobRecord) -> Path:
        """The file with the output of a job."""
        return Path(record.log)

    def log_path(self, job: Job, number: str) -> Path:
        """Where the output of a new job, or of an element, will be."""
        return job.folder / f"job-{number}.log"

    def allocation(self) -> str | None:
        """The number of the allocation that this process is in: a job starts at once there. None outside one."""
        return None

    def settings(self, config: RunConfig, program: str | None) -> tuple[str, ...]:
        """``KEY=VALUE`` that the launcher adds to the run's configuration, such as how many processes its hosts take.

        Raises:
            UserError: the configuration lacks something that the launcher must know.
        """
        return ()

    def resolve_cluster(self, config: RunConfig, is_set: Callable[[str], bool], again: bool) -> ResolvedCluster:
        """The section ``cluster``, with what the launcher decides where the user leaves it open.

        Args:
            is_set: says whether the user has given the setting of this name, and it is not just the default.
            again: whether an earlier job is submitted again.

        Raises:
            UserError: the section asks for what the launcher cannot give.
        """
        return ResolvedCluster(ClusterSection.of(config))

    def make_job(self, config: RunConfig, cluster: ClusterSection, program: str | None) -> Job:
        """``drawbar train`` as this launcher runs it; see :func:`drawbar.jobs.job.make_job`."""
        return make_job(config, cluster, program)

    def check(self, job: Job) -> list[str]:
        """Check whether the job could ever run. Returns notes for the user.

        Raises:
            UserError: it could not.
        """
        return []
