"""The launchers by name: those of drawbar, and those of other packages (entry points ``drawbar.launchers``)."""

from collections.abc import Iterable

from drawbar.config.io.user_modules import cause
from drawbar.errors import UserError
from drawbar.launch.jobs.job_status import UNKNOWN, JobStatus, status_from_files
from drawbar.launch.jobs.records import JobRecord
from drawbar.launch.launcher import Launcher
from drawbar.util.registry import Registry

LAUNCHERS: Registry[type[Launcher]] = Registry("launcher", "drawbar.launchers")
LAUNCHERS.register_lazy("slurm", "drawbar.launch.slurm.slurm_launcher:SlurmLauncher")
LAUNCHERS.register_lazy("ssh", "drawbar.launch.ssh.ssh_launcher:SshLauncher")


def get_launcher(name: str, where: str) -> Launcher:
    """A launcher by its name; errors say that ``where`` names it. Raises UserError if there is none."""
    made = LAUNCHERS.get(name, where)
    try:
        launcher = made()
    except Exception as error:
        raise _no_launcher(f"the launcher {name!r} cannot be made: {cause(error)}", name, where) from error
    if not isinstance(launcher, Launcher):
        raise _no_launcher(f"{name!r} stands for no Launcher of drawbar.launch.launcher", name, where)
    return launcher


def _no_launcher(what: str, name: str, where: str) -> UserError:
    return UserError(what, where=where, remedy=f"correct the package that brings {name}, or choose another launcher")


def launcher_of(record: JobRecord) -> Launcher:
    """The launcher that a job was submitted by. Raises UserError where it is no longer installed."""
    return get_launcher(record.launcher, f"the record of job {record.number}")


def ask_status(records: Iterable[JobRecord]) -> list[JobStatus]:
    """The status of these jobs, in their order. Each launcher is asked once for all of its jobs.

    Raises:
        UserError: a launcher cannot tell, and some of its jobs have no file that says how they ended.
    """
    statuses, errors = ask_status_where_possible(records)
    if errors:
        raise errors[0]
    return statuses


def ask_status_where_possible(records: Iterable[JobRecord]) -> tuple[list[JobStatus], list[UserError]]:
    """The status of these jobs, in their order, and the errors of launchers that cannot tell: those of their jobs that
    have no end file are ``UNKNOWN``, and may be active."""
    wanted, errors = list(records), []
    found: dict[JobRecord, JobStatus] = {}
    for name in dict.fromkeys(record.launcher for record in wanted):
        own = [record for record in wanted if record.launcher == name]
        try:
            statuses = launcher_of(own[0]).status(own)
        except UserError as error:
            ended = [status_from_files(record) for record in own]
            if None in ended:
                errors.append(error)
            statuses = [
                status or JobStatus(record, UNKNOWN, is_active=True) for status, record in zip(ended, own, strict=True)
            ]
        found.update(zip(own, statuses, strict=True))
    return [found[record] for record in wanted], errors
