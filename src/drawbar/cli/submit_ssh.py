"""``drawbar submit --to ssh``."""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.arguments import load
from drawbar.cli.sending import train_command
from drawbar.cli.submit import own_program
from drawbar.config.cluster import ClusterSection
from drawbar.config.cluster_rules import SUBMIT_RULES
from drawbar.config.deepspeed_json import check_deepspeed
from drawbar.config.hosts import Host, parse_host, parse_hosts, read_hostfile
from drawbar.config.load import dump_yaml
from drawbar.config.rules import RULES, TRAIN_RULES, check_rules, check_world
from drawbar.config.schema import RunConfig
from drawbar.errors import ExitCode, UserError
from drawbar.launch.container import VARIABLES, make_container
from drawbar.launch.fleet import run
from drawbar.launch.host_gpus import count_gpus
from drawbar.launch.job import Job
from drawbar.launch.pdsh import pdsh_command
from drawbar.launch.ssh import check_programs, describe, forwarded, render
from drawbar.runtime.streams import outlive_readers

if TYPE_CHECKING:
    from drawbar.tasks.task import Task


def submit_ssh(
    task: "type[Task] | None",
    arguments: tuple[str, ...],
    launcher: str | None,
    hosts: str | None,
    hostfile: str | None,
    cluster: str | None,
    nodes: int | None,
    dry_run: bool,
) -> int:
    """Run the job, or print what would run; the exit code of the run."""
    if launcher == "slurm" or nodes is not None or (hosts and hostfile):
        raise click.UsageError("--hosts, --hostfile, --nodes and --to slurm exclude one another")
    loaded = load(arguments, task, cluster)
    machines = ask_for_slots(loaded.config, task, choose_hosts(loaded.config, hosts, hostfile))
    processes = count_processes(loaded.config, machines)
    names = [f"{host.name}:{processes}" for host in machines]
    settings = (f"cluster.hosts={json.dumps(names)}", f"cluster.nodes={len(machines)}", f"launch.nproc={processes}")
    loaded = load((*arguments, *settings), task, cluster)
    check_rules(loaded, RULES + TRAIN_RULES + SUBMIT_RULES)
    check_world(loaded.config, len(machines) * processes)
    check_deepspeed(loaded, len(machines) * processes)
    section = loaded.config.cluster or ClusterSection()
    job = make_job(loaded.config, section, task)
    starts = render(job, section, machines)
    if dry_run:
        over_pdsh = section.ssh_program == "pdsh"
        commands = [pdsh_command(starts, "SOCKET")] if over_pdsh else [start.command for start in starts]
        click.echo(describe(job.name, starts, commands), nl=False)
        return ExitCode.DONE
    for program in {"ssh", section.ssh_program}:
        check_programs(program, shutil.which(program))
    outlive_readers()
    return run(starts, section.ssh_program, loaded.config.launch.timeout)


def choose_hosts(config: RunConfig, hosts: str | None, hostfile: str | None) -> list[Host]:
    """The machines to run on: of the command line, or else of the section ``cluster``.

    Raises:
        UserError: there are none, or what names them cannot be read.
    """
    if hosts is not None:
        return parse_hosts(hosts)
    if hostfile is not None:
        return read_hostfile(Path(hostfile))
    known = config.cluster.hosts if config.cluster else []
    if not known:
        raise UserError(
            "no hosts to run on",
            where="--to ssh",
            remedy="give --hosts gpu1:8,gpu2:8, --hostfile FILE, or set cluster.hosts",
        )
    return [parse_host(text) for text in known]


def ask_for_slots(config: RunConfig, task: "type[Task] | None", hosts: list[Host]) -> list[Host]:
    """The hosts, each with its slots where those depend on its GPUs and nothing says how many it has.

    Raises:
        UserError: a host of which nothing says it does not, either.
    """
    section = config.cluster or ClusterSection()
    unknown = [host for host in hosts if host.slots is None]
    if not unknown or section.gpu_count is not None or not config.takes_all_gpus:
        return hosts
    check_programs("ssh", shutil.which("ssh"))
    found = count_gpus(make_job(config, section, task), section, unknown, config.launch.timeout)
    gpus = {host.name: count for host, count in zip(unknown, found, strict=True)}
    click.echo(f"note: GPUs of the hosts: {', '.join(f'{name} has {count}' for name, count in gpus.items())}", err=True)
    return [host if host.slots else Host(host.name, max(1, gpus[host.name])) for host in hosts]


def count_processes(config: RunConfig, hosts: list[Host]) -> int:
    """The processes on each host: its slots, or fewer where the configuration wants fewer.

    Raises:
        UserError: the hosts have different numbers of slots, or fewer than the configuration wants.
    """
    wanted = config.launch.nproc
    gpus = config.cluster.gpu_count if config.cluster else None
    default = gpus or 1 if wanted == "auto" else wanted
    slots = {host.slots or default: host for host in hosts}
    fewest = min(slots)
    if wanted != "auto" and wanted > fewest:
        raise UserError(
            f"launch.nproc={wanted}, but the host {slots[fewest].name} has {fewest} slots",
            where="the hosts",
            remedy=f"set launch.nproc={fewest} or auto, or give the host more slots",
        )
    if wanted == "auto" and len(slots) > 1:
        counts = ", ".join(f"{host.name} has {count}" for count, host in slots.items())
        raise UserError(
            f"each host must run as many processes as the others, but {counts}",
            where="the hosts",
            remedy=f"set launch.nproc={fewest}",
        )
    return fewest if wanted == "auto" else wanted


def make_job(config: RunConfig, cluster: ClusterSection, task: "type[Task] | None") -> Job:
    """``drawbar train`` on the hosts.

    Raises:
        UserError: the container is one that only Slurm can start.
    """
    workdir = Path(cluster.workdir).absolute() if cluster.workdir else Path.cwd()
    container = make_container(config, cluster, workdir)
    if container is not None and container.runtime == "pyxis":
        raise UserError(
            "pyxis is a part of Slurm, and cannot start a container over ssh",
            where="cluster.image, cluster.container",
            remedy="make a .sif file of the image for Apptainer, or submit with --to slurm",
        )
    variables = forwarded(cluster.forward, os.environ, cluster.environment)
    return Job(
        name=config.run.name,
        argv=train_command(cluster, container, own_program(task)),
        config=dump_yaml(config),
        workdir=workdir,
        run_dir=config.run_dir.absolute(),
        nodes=cluster.nodes,
        processes=config.launch.nproc if config.launch.nproc != "auto" else 1,
        environment={**variables, **VARIABLES} if container else variables,
        container=container,
    )
