"""``drawbar submit``."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drawbar.errors import ExitCode

if TYPE_CHECKING:
    from drawbar.config.cluster import ClusterSection
    from drawbar.config.schema import RunConfig
    from drawbar.launch.container import Container
    from drawbar.launch.job import Job
    from drawbar.tasks.task import Task


@click.command(
    epilog="""\b
Examples:
  drawbar submit config.yaml --to slurm --nodes 2 cluster.gpus_per_node=8 cluster.time=12:00:00
  drawbar submit config.yaml --to slurm --dry-run                 read the script first
  drawbar submit config.yaml --to slurm --cluster NAME optim.lr=1e-4
  drawbar submit config.yaml --to slurm --image drawbar.sif       in a container on each node
  drawbar submit config.yaml --hosts gpu1:8,gpu2:8                 over ssh; or --hostfile FILE

\b
What the cluster needs to know is in the section cluster of CONFIG, or in a profile that all your runs share:
~/.config/drawbar/clusters/NAME.yaml holds the keys of that section, such as partition, account and gpus_per_node.
The same command again goes on where the run stopped.
"""
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...")
@click.option("--to", "launcher", type=click.Choice(["slurm", "ssh"]), help="What runs the job: a scheduler, or ssh.")
@click.option("--hosts", metavar="A:4,B:4", help="Machines to run on over ssh, each with its processes.")
@click.option("--hostfile", metavar="FILE", help="The same from a file with lines such as `gpu1 slots=4`.")
@click.option("--cluster", metavar="NAME", help="Take the profile NAME for what the section cluster leaves open.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines to run on; short for cluster.nodes=N.")
@click.option("--image", metavar="IMAGE", help="Run in this container; short for cluster.image=IMAGE.")
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
    dry_run: bool,
) -> int:
    """Run `drawbar train` on the nodes of a cluster.

    Settings are checked here, before the job waits in a queue. An interrupted job saves, goes back into the queue, and
    goes on from where it was. Over ssh, this command stays until the run is over, and ends with its exit code.
    """
    if hosts is not None or hostfile is not None or launcher == "ssh":
        from drawbar.cli.submit_ssh import submit_ssh

        inside = () if image is None else (f"cluster.image={json.dumps(image)}",)
        return submit_ssh(task, (*arguments, *inside), launcher, hosts, hostfile, cluster, nodes, dry_run)
    if launcher is None:
        raise click.UsageError("say where to run it: --to slurm, --to ssh, --hosts or --hostfile")
    from drawbar.cli.arguments import load
    from drawbar.config.cluster import ClusterSection
    from drawbar.config.cluster_rules import SUBMIT_RULES
    from drawbar.config.deepspeed_json import check_deepspeed
    from drawbar.config.rules import RULES, TRAIN_RULES, check_rules, check_world
    from drawbar.launch.container import check_image
    from drawbar.launch.slurm import log_path, render
    from drawbar.launch.slurm import submit as to_slurm

    settings = arguments if nodes is None else (*arguments, f"cluster.nodes={nodes}")
    settings = settings if image is None else (*settings, f"cluster.image={json.dumps(image)}")
    loaded = load(settings, task, cluster)
    check_rules(loaded, RULES + TRAIN_RULES + SUBMIT_RULES)
    section = loaded.config.cluster or ClusterSection()
    job = make_job(loaded.config, section, task, arguments)
    check_world(loaded.config, job.nodes * job.processes)
    check_deepspeed(loaded, job.nodes * job.processes)
    script = render(job, section)
    if dry_run:
        click.echo(script, nl=False)
        return ExitCode.DONE
    if job.container is not None:
        check_image(job.container)
    number = to_slurm(job, script)
    click.echo(f"job {number}: run {job.name} on {job.nodes} × {job.processes} processes")
    click.echo(f"log: {log_path(job, number)}")
    return ExitCode.DONE


def make_job(
    config: "RunConfig", cluster: "ClusterSection", task: "type[Task] | None", arguments: tuple[str, ...]
) -> "Job":
    """What ``drawbar train ARGUMENTS`` is on the nodes."""
    from drawbar.launch.container import VARIABLES, make_container
    from drawbar.launch.job import Job

    container = make_container(config, cluster, Path.cwd())
    processes = config.launch.nproc if config.launch.nproc != "auto" else cluster.gpus_per_node or 1
    settings = (*arguments, f"launch.nproc={processes}")
    words = ("--", *settings) if settings[0].startswith("-") else settings
    return Job(
        name=config.run.name,
        argv=(*train_command(cluster, task, container), *words),
        workdir=Path.cwd(),
        run_dir=config.run_dir.absolute(),
        nodes=cluster.nodes,
        processes=processes,
        environment=VARIABLES if container else {},
        container=container,
    )


def train_command(
    cluster: "ClusterSection", task: "type[Task] | None", container: "Container | None"
) -> tuple[str, ...]:
    """``drawbar train`` on the nodes."""
    from drawbar.launch.container import PYTHON

    python = cluster.python or (PYTHON if container else sys.executable)
    program = ("-m", "drawbar") if task is None else (str(Path(sys.argv[0]).absolute()),)
    return (python, *program, "train")
