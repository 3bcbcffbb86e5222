"""``drawbar submit``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.cli.complete_words import complete_config_and_settings
from drawbar.errors import ExitCode

if TYPE_CHECKING:
    from drawbar.jobs.submission import PreparedJob
    from drawbar.tasks.task import Task

DEFAULT_HOSTS_LAUNCHER = "ssh"
"""The launcher for --hosts and --hostfile where --to names none."""


@click.command(
    short_help="Train on a Slurm cluster or on ssh hosts.",
    epilog="""\b
Examples:
  drawbar submit config.yaml --to slurm --nodes 2 cluster.gpus_per_node=8 cluster.time=12:00:00
  drawbar submit config.yaml --to slurm --dry-run                 read the script first
  drawbar submit config.yaml --to slurm --cluster NAME optim.lr=1e-4
  drawbar submit config.yaml --to slurm --image drawbar.sif       in a container on each node
  drawbar submit config.yaml --to slurm --sweep optim.lr=1e-4,3e-4 --at-once 4
  drawbar submit config.yaml --to slurm --snapshot                with a copy of your code as it is now
  drawbar submit config.yaml --hosts gpu1:8,gpu2:8                 over ssh; or --hostfile FILE

\b
What the cluster needs to know is in the section cluster of CONFIG, or in a profile that all your runs share:
~/.config/drawbar/clusters/NAME.yaml holds the keys of that section, such as partition, account and gpus_per_node.
The same command again resumes where the run stopped; so does `drawbar resume`. `drawbar jobs` lists your jobs.
Inside an allocation (salloc) the run starts in it at once, and this command ends with it.
A sweep is one job, in which each combination of values is a run of its own name.
""",
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...", shell_complete=complete_config_and_settings)
@click.option("--to", "name", metavar="slurm|ssh|NAME", help="What runs the job: a scheduler, ssh, or a package's own.")
@click.option("--hosts", metavar="A:4,B:4", help="Machines to run on over ssh, each with its processes.")
@click.option("--hostfile", metavar="FILE", help="The same from a file with lines such as `gpu1 slots=4`.")
@click.option("--cluster", metavar="NAME", help="Take the profile NAME for what the section cluster leaves open.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines to run on; short for cluster.nodes=N.")
@click.option("--image", metavar="IMAGE", help="Run in this container; short for cluster.image=IMAGE.")
@click.option(
    "--sweep", multiple=True, metavar="KEY=VALUE,VALUE", help="A run for each value; several give all combinations."
)
@click.option("--at-once", type=click.IntRange(min=1), help="For a sweep: run at most this many runs at the same time.")
@click.option("--snapshot", is_flag=True, help="Run with a copy of your code as it is now, as far as git knows it.")
@click.option("--force", is_flag=True, help="Submit a run that does not fit into cluster.gpu_memory, too.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@click.pass_obj
def submit(
    task: "type[Task] | None",
    arguments: tuple[str, ...],
    name: str | None,
    hosts: str | None,
    hostfile: str | None,
    cluster: str | None,
    nodes: int | None,
    image: str | None,
    sweep: tuple[str, ...],
    at_once: int | None,
    snapshot: bool,
    force: bool,
    dry_run: bool,
) -> int:
    """Run `drawbar train` on the nodes of a cluster.

    Settings are checked here, before the job waits in a queue, and the job has them as they are now, whatever becomes
    of CONFIG. An interrupted job saves, returns to the queue, and resumes where it was. Over ssh, this command
    stays until the run is over, and ends with its exit code.
    """
    from drawbar.cli.arguments import user_program
    from drawbar.jobs.code_snapshot import code_version, snapshot_name
    from drawbar.jobs.launchers import get_launcher
    from drawbar.jobs.submission import SubmitRequest, name_elements, prepare_job, prepare_sweep
    from drawbar.jobs.sweep import combine

    if name is None and hosts is None and hostfile is None:
        raise click.UsageError("say where to run it: --to slurm, --to ssh, --hosts or --hostfile")
    name = name or DEFAULT_HOSTS_LAUNCHER
    launcher = get_launcher(name, "--to")
    if at_once is not None and not sweep:
        raise click.UsageError("--at-once is for a --sweep: it says how many of its runs may run at the same time")
    if (sweep and not launcher.has_sweeps) or (snapshot and not launcher.has_snapshots):
        raise click.UsageError(f"--to {name} does not take --sweep, --at-once or --snapshot; --to slurm does")
    named = [option for option, value in (("--hosts", hosts), ("--hostfile", hostfile)) if value is not None]
    if len(named) > 1 or (named and nodes is not None):
        raise click.UsageError("--hosts, --hostfile and --nodes exclude one another")
    if launcher.takes_hosts and nodes is not None:
        raise click.UsageError(f"--nodes and --to {name} exclude one another: name the machines with --hosts")
    if named and not launcher.takes_hosts:
        raise click.UsageError(f"{named[0]} and --to {name} exclude one another: {name} chooses the machines itself")
    settings = (*arguments, *host_settings(hosts, hostfile))
    settings = settings if image is None else (*settings, f"cluster.image={json.dumps(image)}")
    settings = settings if nodes is None else (*settings, f"cluster.nodes={nodes}")
    here = Path.cwd()
    copy = snapshot_name(here) if snapshot else None
    request = SubmitRequest(settings, name, task, cluster, user_program(task), code_version(here), copy, force=force)
    if sweep:
        return send(prepare_sweep(request, *name_elements(request, combine(sweep)), at_once), dry_run)
    return send(prepare_job(request), dry_run)


def host_settings(hosts: str | None, hostfile: str | None) -> tuple[str, ...]:
    """``cluster.hosts`` as the command line or a file has it. Raises UserError if it cannot be read."""
    from drawbar.jobs.hosts_file import parse_hosts, read_hostfile

    if hosts is None and hostfile is None:
        return ()
    found = parse_hosts(hosts) if hosts is not None else read_hostfile(Path(str(hostfile)))
    return (f"cluster.hosts={json.dumps([str(host) for host in found])}",)


def send(prepared: "PreparedJob", dry_run: bool) -> int:
    """Print what would be submitted (``dry_run``), or submit it. Returns the exit code for this command."""
    for note in prepared.notes:
        click.echo(f"note: {note}", err=True)
    if dry_run:
        click.echo(prepared.script(), nl=False)
        return ExitCode.DONE
    return prepared.submit()
