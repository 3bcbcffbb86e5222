"""``drawbar submit``."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.errors import ExitCode

if TYPE_CHECKING:
    from drawbar.cli.sending import Sending
    from drawbar.launch.records import JobRecord
    from drawbar.tasks.task import Task


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
The same command again goes on where the run stopped; so does `drawbar resume`. `drawbar jobs` lists your jobs.
Inside an allocation (salloc) the run starts in it at once, and this command ends with it.
A sweep is one job, in which each combination of values is a run of its own name.
""",
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...")
@click.option("--to", "launcher", type=click.Choice(["slurm", "ssh"]), help="What runs the job: a scheduler, or ssh.")
@click.option("--hosts", metavar="A:4,B:4", help="Machines to run on over ssh, each with its processes.")
@click.option("--hostfile", metavar="FILE", help="The same from a file with lines such as `gpu1 slots=4`.")
@click.option("--cluster", metavar="NAME", help="Take the profile NAME for what the section cluster leaves open.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines to run on; short for cluster.nodes=N.")
@click.option("--image", metavar="IMAGE", help="Run in this container; short for cluster.image=IMAGE.")
@click.option(
    "--sweep", multiple=True, metavar="KEY=VALUE,VALUE", help="A run for each value; several give all combinations."
)
@click.option("--at-once", type=click.IntRange(min=1), help="Of a sweep: so many runs at the same time, at most.")
@click.option("--snapshot", is_flag=True, help="Run with a copy of your code as it is now, as far as git knows it.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@click.pass_obj
def submit(
    task: "type[Task] | None",
    arguments: tuple[str, ...],
    launcher: str | None,
    hosts: str | None,
    hostfile: str | None,
    cluster: str | None,
    nodes: int | None,
    image: str | None,
    sweep: tuple[str, ...],
    at_once: int | None,
    snapshot: bool,
    dry_run: bool,
) -> int:
    """Run `drawbar train` on the nodes of a cluster.

    Settings are checked here, before the job waits in a queue, and the job has them as they are now, whatever becomes
    of CONFIG. An interrupted job saves, goes back into the queue, and goes on from where it was. Over ssh, this command
    stays until the run is over, and ends with its exit code.
    """
    from drawbar.cli.sending import Submission, name_elements, plan, plan_sweep
    from drawbar.launch.code import code_version, snapshot_name
    from drawbar.launch.sweep import combine

    settings = arguments if image is None else (*arguments, f"cluster.image={json.dumps(image)}")
    if hosts is not None or hostfile is not None or launcher == "ssh":
        from drawbar.cli.submit_ssh import submit_ssh

        if sweep or at_once or snapshot:
            raise click.UsageError("--sweep, --at-once and --snapshot are for --to slurm")
        return submit_ssh(task, settings, launcher, hosts, hostfile, cluster, nodes, dry_run)
    if launcher is None:
        raise click.UsageError("say where to run it: --to slurm, --to ssh, --hosts or --hostfile")

    if at_once is not None and not sweep:
        raise click.UsageError("--at-once is for a --sweep: it says how many of its runs may run at the same time")
    settings = settings if nodes is None else (*settings, f"cluster.nodes={nodes}")
    here = Path.cwd()
    copy = snapshot_name(here) if snapshot else None
    request = Submission(settings, task, cluster, own_program(task), code_version(here), copy)
    if sweep:
        send(plan_sweep(request, *name_elements(request, combine(sweep)), at_once), dry_run)
    else:
        send(plan(request), dry_run)
    return ExitCode.DONE


def send(sending: "Sending", dry_run: bool) -> None:
    """Show it, run it in the allocation that this process is in, or submit it."""
    for note in sending.notes:
        click.echo(f"note: {note}", err=True)
    if dry_run:
        click.echo(sending.script(), nl=False)
    elif sending.job.allocation is not None:
        sending.run_here()
    else:
        tell_submitted(sending.submit())


def own_program(task: "type[Task] | None") -> str | None:
    """The user's own script, where it is what was called."""
    return None if task is None else str(Path(sys.argv[0]).absolute())


def tell_submitted(records: "list[JobRecord]") -> None:
    """What the job is called, where its log is, and how to see more."""
    first = records[0]
    size = f"{first.nodes} × {first.processes} processes"
    if first.sweep is None:
        click.echo(f"job {first.number}: run {first.run} on {size}")
        _tell_code(first)
        click.echo(f"log: {first.log}")
        return
    click.echo(f"job {first.array}: sweep {first.sweep}, {len(records)} runs on {size} each")
    for record in records:
        click.echo(f"  {record.number}: {record.run}")
    _tell_code(first)
    click.echo(f"logs: {first.log.replace(first.number, f'{first.array}_*')}")


def _tell_code(record: "JobRecord") -> None:
    if record.snapshot is not None:
        click.echo(f"code: a copy in {record.snapshot}")
    elif record.code is not None:
        click.echo(f"code: {record.code}; the job takes what is there when it starts, or with --snapshot a copy")
