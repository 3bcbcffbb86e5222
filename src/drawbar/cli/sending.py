"""From the arguments of ``drawbar submit`` to a job: what ``submit`` and ``resume`` share."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.arguments import load
from drawbar.cli.preflight import check_before_queue
from drawbar.config.cluster import ClusterSection
from drawbar.config.cluster_rules import SUBMIT_RULES
from drawbar.config.compare import check_same
from drawbar.config.deepspeed_json import check_deepspeed
from drawbar.config.load import LoadedConfig, dump_yaml
from drawbar.config.rules import RULES, TRAIN_RULES, check_rules, check_world
from drawbar.config.schema import RunConfig
from drawbar.errors import UserError
from drawbar.launch.allocation import Allocation
from drawbar.launch.code import copy_code, is_tracked
from drawbar.launch.container import PYTHON, VARIABLES, Container, check_image, make_container
from drawbar.launch.cpus import few_cpus, with_cpus
from drawbar.launch.job import Job
from drawbar.launch.records import JobRecord, keep
from drawbar.launch.slurm import log_path, render
from drawbar.launch.slurm import submit as to_slurm
from drawbar.launch.sweep import name_runs

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


@dataclass(frozen=True)
class Submission:
    """What a user wants to be run, in the current folder."""

    arguments: tuple[str, ...]
    """``[CONFIG] [KEY=VALUE]...``"""
    task: "type[Task] | None" = None
    profile: str | None = None
    """The cluster profile."""
    program: str | None = None
    """Absolute path of the user's own script, where there is one."""
    version: str | None = None
    """Of the user's own code."""
    snapshot: str | None = None
    """The copy of that code to run with: its name in the job's folder, or of an earlier job its path."""
    submitted: tuple[str, ...] | None = None
    """Of a job that is submitted again, what is read in place of ``arguments``: its configuration, and changes."""

    def load(self) -> LoadedConfig:
        if self.submitted is not None:
            return load(self.submitted, self.task)
        return load(self.arguments, self.task, self.profile)

    def sets(self, key: str, loaded: LoadedConfig) -> bool:
        """Whether the user gives the setting: the configuration of an earlier job gives them all."""
        if self.submitted is not None:
            return any(word.startswith(f"{key}=") for word in self.submitted)
        return key in loaded.origins


@dataclass(frozen=True)
class Sending:
    """A job, checked and ready to go."""

    request: Submission
    job: Job
    cluster: ClusterSection
    elements: tuple[tuple[str, ...], ...] = ()
    """Of a sweep: what each element has of its own, in the order of ``job.elements``."""
    notes: tuple[str, ...] = ()
    """What is good to know before it goes."""

    def script(self) -> str:
        return render(self.job, self.cluster)

    def submit(self) -> list[JobRecord]:
        """Give it to Slurm and write it down. What cannot be written is only told: the job is submitted."""
        if self.job.container is not None:
            check_image(self.job.container)
        self._copy_code()
        script = self.script()
        number = to_slurm(self.job, script)
        records = self._records(number)
        try:
            Path(records[0].script).write_text(script, encoding="utf-8", errors="surrogateescape")
            for record, job in zip(records, self.job.elements or [self.job], strict=True):
                record.config_file.parent.mkdir(parents=True, exist_ok=True)
                record.config_file.write_text(job.config, encoding="utf-8")
            keep(records)
        except OSError as error:
            click.echo(f"warning: job {number} is submitted, but cannot be recorded: {error}", err=True)
        return records

    def run_here(self) -> None:
        """Become the script: this process ends with the exit code of the run."""
        self.job.folder.mkdir(parents=True, exist_ok=True)
        self._copy_code()
        file = self._script_file(str(self.job.allocation))
        file.write_text(self.script(), encoding="utf-8", errors="surrogateescape")
        where = f"in the allocation {self.job.allocation}, on {self.job.nodes} × {self.job.processes} processes"
        click.echo(f"run {self.job.name} starts {where}; for a job of its own, unset SLURM_JOB_ID", err=True)
        sys.stdout.flush()
        os.execvp("bash", ["bash", str(file)])

    def _copy_code(self) -> None:
        """Before the job can begin. Equal code has one copy."""
        copy = self.job.snapshot
        if copy is not None and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy_code(self.job.workdir, copy)

    def _script_file(self, number: str) -> Path:
        return self.job.folder / f"job-{number}.sh"

    def _records(self, number: str) -> list[JobRecord]:
        job, request = self.job, self.request
        whole = JobRecord(
            number=number,
            time=time.time(),
            run=job.name,
            run_dir=str(job.run_dir),
            workdir=str(job.workdir),
            log=str(log_path(job, number)),
            script=str(self._script_file(number)),
            nodes=job.nodes,
            processes=job.processes,
            arguments=request.arguments,
            profile=request.profile,
            program=request.program,
            code=job.version,
            snapshot=None if job.snapshot is None else str(job.snapshot),
        )
        if not job.elements:
            return [whole]
        return [
            replace(
                whole,
                number=f"{number}_{index}",
                run=element.name,
                run_dir=str(element.run_dir),
                log=str(log_path(job, f"{number}_{index}")),
                processes=element.processes,
                sweep=job.name,
                settings=settings,
            )
            for index, (element, settings) in enumerate(zip(job.elements, self.elements, strict=True))
        ]


def plan(request: Submission) -> Sending:
    """Check everything that can be checked before the job waits in a queue.

    Raises:
        UserError: the run could not start.
    """
    sending = _plan_run(request)
    return replace(sending, job=_with_code(sending.job, request))


def _plan_run(request: Submission) -> Sending:
    loaded = request.load()
    check_rules(loaded, RULES + TRAIN_RULES + SUBMIT_RULES)
    allocation = Allocation.here()
    if allocation is None:
        section = _queued(request, loaded)
    else:
        section = allocation.fit(loaded.config, request.sets("cluster.nodes", loaded))
    if (loaded.config.run_dir / "config.yaml").exists():
        check_same(loaded.config.run_dir, loaded.config)
    job = make_job(loaded.config, section, request)
    check_world(loaded.config, job.nodes * job.processes)
    check_deepspeed(loaded, job.nodes * job.processes)
    if allocation is None:
        section, notes = with_cpus(section, job.processes)
    else:
        notes = few_cpus(section, job.processes)
    notes += check_before_queue(loaded.config, section, job, request.task, queued=allocation is None)
    job = replace(job, allocation=allocation.job if allocation else None)
    return Sending(request, job, section, notes=tuple(notes))


def _queued(request: Submission, loaded: LoadedConfig) -> ClusterSection:
    """The section ``cluster`` of a job that is to wait in the queue. One that is submitted again has waited for others
    (``dependency``) before, and Slurm may not know them any more."""
    section = loaded.config.cluster or ClusterSection()
    if request.submitted is None or any(
        request.sets(key, loaded) for key in ("cluster.options", "cluster.options.dependency")
    ):
        return section
    options = {name: value for name, value in section.options.items() if name != "dependency"}
    return section.model_copy(update={"options": options})


def name_elements(request: Submission, elements: Sequence[tuple[str, ...]]) -> tuple[str, list[tuple[str, ...]]]:
    """The name of a sweep, and the settings of its elements with a name for each run."""
    base = load((*request.arguments, *elements[0]), request.task, request.profile).config.run.name
    names = name_runs(base, elements)
    return base, [(*settings, f"run.name={name}") for settings, name in zip(elements, names, strict=True)]


def plan_sweep(
    request: Submission,
    name: str,
    elements: Sequence[tuple[str, ...]],
    at_once: int | None = None,
    submitted: Sequence[tuple[str, ...] | None] = (),
) -> Sending:
    """The same for a sweep: one job, an element for each run.

    Args:
        elements: the settings of each run, its name among them.
        at_once: so many elements run at the same time, at most.
        submitted: of each element that is submitted again, see ``Submission``.

    Raises:
        UserError: one of the runs could not start; it is named.
    """
    allocation = Allocation.here()
    if allocation is not None:
        raise UserError(
            f"a sweep is a job of its own, and this is the allocation {allocation.job}",
            where="--sweep",
            remedy="`exit` the allocation and submit again; or submit the runs here one by one",
        )
    again = submitted or [None] * len(elements)
    sendings = [_plan_element(replace(request, submitted=one), own) for own, one in zip(elements, again, strict=True)]
    jobs = tuple(sending.job for sending in sendings)
    whole = replace(
        jobs[0],
        name=name,
        run_dir=jobs[0].run_dir.with_name(name),
        processes=max(job.processes for job in jobs),
        elements=jobs,
        at_once=at_once,
    )
    notes = dict.fromkeys(note for sending in sendings for note in sending.notes)
    return Sending(request, _with_code(whole, request), sendings[0].cluster, tuple(elements), tuple(notes))


def _plan_element(request: Submission, settings: tuple[str, ...]) -> Sending:
    try:
        return _plan_run(replace(request, arguments=(*request.arguments, *settings)))
    except UserError as error:
        raise UserError(
            f"the run with {' '.join(settings)}: {error.what}", where=error.where, remedy=error.remedy
        ) from error


def make_job(config: RunConfig, cluster: ClusterSection, request: Submission) -> Job:
    """``drawbar train`` on the nodes, with the configuration as it is now."""
    container = make_container(config, cluster, Path.cwd())
    default = cluster.gpu_count or 1 if config.takes_all_gpus else 1
    processes = default if config.launch.nproc == "auto" else config.launch.nproc
    return Job(
        name=config.run.name,
        argv=train_command(cluster, container, request.program),
        config=dump_yaml(config),
        workdir=Path.cwd(),
        run_dir=config.run_dir.absolute(),
        nodes=cluster.nodes,
        processes=processes,
        settings=(f"launch.nproc={processes}",),
        environment=VARIABLES if container else {},
        container=container,
        grace=max(Job.grace, config.launch.roll_call_seconds + 30),
    )


def _with_code(job: Job, request: Submission) -> Job:
    """Which code the job is submitted with, and the copy that it uses."""
    if request.snapshot is None:
        return replace(job, version=request.version)
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
    return replace(job, argv=argv, version=request.version, snapshot=copy)


def train_command(cluster: ClusterSection, container: Container | None, program: str | None) -> tuple[str, ...]:
    """``drawbar train`` on the nodes, or what a user's own script makes of it."""
    python = cluster.python or (PYTHON if container else sys.executable)
    return (python, *(("-m", "drawbar") if program is None else (program,)), "train")
