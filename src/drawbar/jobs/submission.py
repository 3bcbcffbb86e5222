"""Makes a job from the arguments of ``drawbar submit`` or ``drawbar resume``: checks it, submits it and records it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drawbar.cli.arguments import check_training, load
from drawbar.config.io.compare import check_same
from drawbar.config.io.load_config import LoadedConfig
from drawbar.config.rules.rule_table import check_guests, check_world
from drawbar.errors import ExitCode, UserError
from drawbar.jobs.code_snapshot import copy_code, is_tracked
from drawbar.jobs.job import Job
from drawbar.jobs.launcher import Launcher
from drawbar.jobs.launchers import ask_status, get_launcher
from drawbar.jobs.preflight import SUBMIT_RULES, check_before_queue, check_memory
from drawbar.jobs.records import JobRecord, append_records, read, run_file
from drawbar.jobs.settings import read_profile
from drawbar.jobs.sweep import name_runs
from drawbar.util.run_dir import plan_file

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@dataclass(frozen=True)
class SubmitRequest:
    """What a user wants to run, in the current folder."""

    arguments: tuple[str, ...]
    """``[CONFIG] [KEY=VALUE]...``"""
    launcher: str = "slurm"
    """The launcher's name."""
    task: "type[Task] | None" = None
    profile: str | None = None
    """The cluster profile."""
    program: str | None = None
    """Absolute path of the user's own script, where there is one."""
    version: str | None = None
    """The version of the user's own code: ``commit 0123456789ab``."""
    snapshot: str | None = None
    """The copy of that code to run: its name in the job's folder, or its path if an earlier job made it. None to run
    the code as it is when the job starts."""
    resubmitted: tuple[str, ...] | None = None
    """Of a job that is submitted again: the file of its stored configuration, and ``key=value`` changes to it. It is
    read instead of ``arguments``."""
    force: bool = False
    """Submit it even if it does not fit into the memory of the GPUs."""

    def load(self, *settings: str) -> LoadedConfig:
        """The configuration, with some settings overriding the user's."""
        if self.resubmitted is not None:
            return load((*self.resubmitted, *settings), self.task)
        profile = None if self.profile is None else read_profile(self.profile)
        return load((*self.arguments, *settings), self.task, profile)

    def sets(self, key: str, loaded: LoadedConfig) -> bool:
        """Whether the user gives the setting. The stored configuration of a resubmitted job has all settings, so only
        those that are given as changes count."""
        if self.resubmitted is not None:
            return any(word.startswith(f"{key}=") for word in self.resubmitted)
        return key in loaded.origins


@dataclass(frozen=True)
class PreparedJob:
    """A job, checked and ready to be submitted."""

    request: SubmitRequest
    launcher: Launcher
    job: Job
    elements: tuple[tuple[str, ...], ...] = ()
    """Of a sweep: the ``key=value`` settings of each element, in the order of ``job.elements``."""
    notes: tuple[str, ...] = ()
    """What the user should know before the job is submitted."""
    plan: Mapping[str, Any] | None = None
    """What the run is planned to take (``drawbar plan --json``); None if ``check_memory`` made none, of a sweep, and
    of a job that is submitted again."""

    def script(self) -> str:
        return self.launcher.render(self.job)

    def submit(self) -> int:
        """Submit the job and record it. Returns the run's exit code if this process must stay until its end; else 0.

        If recording fails, that is a warning: the job is submitted. Nothing is recorded of a run in an allocation.
        """
        self._copy_code()
        script = self.script()
        submitted = self.launcher.submit(self.job, script)
        if submitted.run_here is None:
            records = self._keep(submitted.number, script)
            _print_submitted(records)
            return ExitCode.DONE
        job = self.job
        size = f"on {job.nodes} × {job.processes} processes"
        if job.allocation is None:
            return submitted.run_here(lambda: self._print_begun(submitted.number, script, size))
        where = f"in the allocation {job.allocation}, {size}"
        click.echo(f"run {job.name} starts {where}; for a job of its own, unset SLURM_JOB_ID", err=True)
        return submitted.run_here(lambda: None)

    def _print_begun(self, number: str, script: str, size: str) -> None:
        record = self._keep(number, script)[0]
        click.echo(f"job {number}: run {self.job.name} {size}; log: {record.log}", err=True)

    def _keep(self, number: str, script: str) -> list[JobRecord]:
        """Record a submitted job, with its script and its configurations."""
        records = self._records(number)
        try:
            self.job.folder.mkdir(parents=True, exist_ok=True)
            Path(records[0].script).write_text(script, encoding="utf-8", errors="surrogateescape")
            for record, job in zip(records, self.job.elements or [self.job], strict=True):
                record.config_file.parent.mkdir(parents=True, exist_ok=True)
                record.config_file.write_text(job.config, encoding="utf-8")
            if self.plan is not None:
                plan_file(self.job.run_dir).write_text(json.dumps(dict(self.plan), indent=2) + "\n", encoding="utf-8")
            append_records(records)
        except OSError as error:
            click.echo(f"warning: job {number} is submitted, but cannot be recorded: {error}", err=True)
        return records

    def _copy_code(self) -> None:
        """Copy the user's code to ``job.snapshot``, unless it is there already: equal code has one copy."""
        copy = self.job.snapshot
        if copy is not None and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy_code(self.job.workdir, copy)

    def _records(self, number: str) -> list[JobRecord]:
        job, request = self.job, self.request
        whole = JobRecord(
            number=number,
            time=time.time(),
            run=job.name,
            run_dir=str(job.run_dir),
            workdir=str(Path.cwd()),
            log=str(self.launcher.log_path(job, number)),
            script=str(job.folder / f"job-{number}.sh"),
            nodes=job.nodes,
            processes=job.processes,
            arguments=request.arguments,
            profile=request.profile,
            program=request.program,
            code=job.version,
            snapshot=None if job.snapshot is None else str(job.snapshot),
            launcher=request.launcher,
        )
        if not job.elements:
            return [whole]
        return [
            replace(
                whole,
                number=f"{number}_{index}",
                run=element.name,
                run_dir=str(element.run_dir),
                log=str(self.launcher.log_path(job, f"{number}_{index}")),
                processes=element.processes,
                sweep=job.name,
                settings=settings,
            )
            for index, (element, settings) in enumerate(zip(job.elements, self.elements, strict=True))
        ]


def prepare_job(request: SubmitRequest) -> PreparedJob:
    """Check everything that can be checked before the job waits in a queue.

    Raises:
        UserError: the run could not start.
    """
    prepared = _prepare_run(request, get_launcher(request.launcher, "--to"))
    return replace(prepared, job=_with_code(prepared.job, request))


def _prepare_run(request: SubmitRequest, launcher: Launcher) -> PreparedJob:
    loaded = request.load()
    if added := launcher.settings(loaded.config, request.program):
        loaded = request.load(*added)
    config = loaded.config
    check_training(loaded, SUBMIT_RULES)
    completed = launcher.resolve_cluster(
        config, lambda key: request.sets(key, loaded), again=request.resubmitted is not None
    )
    if launcher.shares_disk and (config.run_dir / "config.yaml").exists():
        check_same(config.run_dir, config)
    job = replace(
        launcher.make_job(config, completed.cluster, request.program),
        version=request.version,
        allocation=launcher.allocation(),
    )
    if launcher.one_machine and job.nodes > 1:
        raise UserError(
            f"the launcher {request.launcher} runs a job on one machine, and not on {job.nodes}",
            where="cluster.nodes",
            remedy="set cluster.nodes=1, or leave out --nodes",
        )
    check_world(config, job.nodes * job.processes)
    check_guests(loaded, job.nodes * job.processes)
    found = check_before_queue(config, job, launcher, request.task)
    notes = (*completed.notes, *_notes_of_active_jobs(config.run_dir), *found)
    if request.resubmitted is None:  # the memory of a job that ran before need not be checked
        note, plan = check_memory(job, request.program, request.force)
        return PreparedJob(request, launcher, job, notes=(*notes, *([note] if note else [])), plan=plan)
    return PreparedJob(request, launcher, job, notes=notes)


def _notes_of_active_jobs(run_dir: Path) -> list[str]:
    """Notes about other jobs of the same run. Not a refusal: the new one may be set to wait for them."""
    try:
        statuses = ask_status(read(run_file(run_dir)))
    except UserError:  # the scheduler does not answer; the run directory's lock keeps two runs apart
        return []
    return [
        f"job {status.record.number} of this run has not ended ({status.summary}): "
        "the new one is refused if it starts before that"
        for status in statuses
        if status.is_active
    ]


def name_elements(request: SubmitRequest, elements: Sequence[tuple[str, ...]]) -> tuple[str, list[tuple[str, ...]]]:
    """The name of a sweep, and the settings of its elements with a name for each run."""
    base = request.load(*elements[0]).config.run.name
    names = name_runs(base, elements)
    return base, [(*settings, f"run.name={name}") for settings, name in zip(elements, names, strict=True)]


def prepare_sweep(
    request: SubmitRequest,
    name: str,
    elements: Sequence[tuple[str, ...]],
    at_once: int | None = None,
    resubmitted: Sequence[tuple[str, ...] | None] = (),
) -> PreparedJob:
    """Check a sweep, as ``prepare_job`` does a run: one job, with an element for each run.

    Args:
        elements: the settings of each run, its name among them.
        at_once: the largest number of elements that run at the same time; None for no limit.
        resubmitted: ``SubmitRequest.resubmitted`` of each element.

    Raises:
        UserError: one of the runs could not start; it is named.
    """
    launcher = get_launcher(request.launcher, "--to")
    allocation = launcher.allocation()
    if allocation is not None:
        raise UserError(
            f"a sweep is a job of its own, and this is the allocation {allocation}",
            where="--sweep",
            remedy="`exit` the allocation and submit again; or submit the runs here one by one",
        )
    again = resubmitted or [None] * len(elements)
    prepared = [
        _prepare_element(replace(request, resubmitted=one), launcher, own)
        for own, one in zip(elements, again, strict=True)
    ]
    jobs = tuple(one.job for one in prepared)
    whole = replace(
        jobs[0],
        name=name,
        run_dir=jobs[0].run_dir.with_name(name),
        processes=max(job.processes for job in jobs),
        elements=jobs,
        at_once=at_once,
    )
    notes = dict.fromkeys(note for one in prepared for note in one.notes)
    return PreparedJob(request, launcher, _with_code(whole, request), tuple(elements), tuple(notes))


def _prepare_element(request: SubmitRequest, launcher: Launcher, settings: tuple[str, ...]) -> PreparedJob:
    try:
        return _prepare_run(replace(request, arguments=(*request.arguments, *settings)), launcher)
    except UserError as error:
        raise UserError(
            f"the run with {' '.join(settings)}: {error.what}", where=error.where, remedy=error.remedy
        ) from error


def _with_code(job: Job, request: SubmitRequest) -> Job:
    """The job, set to run the copy of the user's code where the request asks for one."""
    if request.snapshot is None:
        return job
    copy, argv = job.folder / request.snapshot, job.argv
    if request.snapshot == str(copy) and not copy.is_dir():
        raise UserError(
            "the copy of the code that the job was submitted with is gone",
            where=request.snapshot,
            remedy="`drawbar submit --snapshot` takes the code as it is now",
        )
    if request.program is not None:
        program = Path(request.program)
        if not program.is_relative_to(job.workdir):
            raise UserError(
                f"{program} is not in the folder that the job is submitted from, and so not in the copy of it",
                where="--snapshot",
                remedy=f"submit from {program.parent}, or without --snapshot",
            )
        if not copy.is_dir() and not is_tracked(job.workdir, program.relative_to(job.workdir)):
            raise UserError(
                f"git does not know {program.name}, so it would not be in the copy of your code",
                where="--snapshot",
                remedy=f"`git add {program.name}` (a commit is not needed), or submit without --snapshot",
            )
        inside = str(copy / program.relative_to(job.workdir))
        argv = tuple(inside if word == request.program else word for word in argv)
    return replace(job, argv=argv, snapshot=copy)


def _print_submitted(records: Sequence[JobRecord]) -> None:
    """What the job is called, where its log is, and how to see more."""
    first = records[0]
    size = f"{first.nodes} × {first.processes} processes"
    if first.sweep is None:
        click.echo(f"job {first.number}: run {first.run} on {size}")
        _print_code_version(first)
        click.echo(f"log: {first.log}")
        return
    click.echo(f"job {first.array_id}: sweep {first.sweep}, {len(records)} runs on {size} each")
    for record in records:
        click.echo(f"  {record.number}: {record.run}")
    _print_code_version(first)
    click.echo(f"logs: {first.log.replace(first.number, f'{first.array_id}_*')}")


def _print_code_version(record: JobRecord) -> None:
    if record.snapshot is not None:
        click.echo(f"code: a copy in {record.snapshot}")
    elif record.code is not None:
        click.echo(f"code: {record.code}; the job takes what is there when it starts, or with --snapshot a copy")
