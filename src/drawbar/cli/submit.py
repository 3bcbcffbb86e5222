"""``drawbar submit``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from drawbar.config.cluster import ClusterSection
    from drawbar.config.schema import RunConfig
    from drawbar.launch.job import Job
    from drawbar.tasks.task import Task


@click.command(
    epilog="""\b
Examples:
  drawbar submit config.yaml --to slurm --nodes 2 cluster.gpus_per_node=8 cluster.time=12:00:00
  drawbar submit config.yaml --to slurm --dry-run                 read the script first
  drawbar submit config.yaml --to slurm --cluster NAME optim.lr=1e-4

\b
What the cluster needs to know is in the section cluster of CONFIG, or in a profile that all your runs share:
~/.config/drawbar/clusters/NAME.yaml holds the keys of that section, such as partition, account and gpus_per_node.
The same command again goes on where the run stopped.
"""
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...")
@click.option("--to", "launcher", type=click.Choice(["slurm"]), required=True, help="The scheduler that runs the job.")
@click.option("--cluster", metavar="NAME", help="Take the profile NAME for what the section cluster leaves open.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines to run on; short for cluster.nodes=N.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@click.pass_obj
def submit(
    task: "type[Task] | None",
    arguments: tuple[str, ...],
    launcher: str,
    cluster: str | None,
    nodes: int | None,
    dry_run: bool,
) -> None:
    """Run `drawbar train` on the nodes of a cluster.

    Settings are checked here, before the job waits in a queue. An interrupted job saves, goes back into the queue, and
    goes on from where it was.
    """
    from drawbar.cli.arguments import load
    from drawbar.cli.preflight import check_before_queue
    from drawbar.config.cluster import ClusterSection
    from drawbar.config.cluster_rules import SUBMIT_RULES
    from drawbar.config.deepspeed_json import check_deepspeed
    from drawbar.config.rules import RULES, TRAIN_RULES, check_rules, check_world
    from drawbar.launch.slurm import log_path, render
    from drawbar.launch.slurm import submit as to_slurm

    settings = arguments if nodes is None else (*arguments, f"cluster.nodes={nodes}")
    loaded = load(settings, task, cluster)
    check_rules(loaded, RULES + TRAIN_RULES + SUBMIT_RULES)
    section = loaded.config.cluster or ClusterSection()
    job = make_job(loaded.config, section, task, arguments)
    check_world(loaded.config, job.nodes * job.processes)
    check_deepspeed(loaded, job.nodes * job.processes)
    script = render(job, section)
    for note in check_before_queue(loaded.config, section, job, task, launcher):
        click.echo(f"note: {note}", err=True)
    if dry_run:
        click.echo(script, nl=False)
        return
    number = to_slurm(job, script)
    click.echo(f"job {number}: run {job.name} on {job.nodes} × {job.processes} processes")
    click.echo(f"log: {log_path(job, number)}")


def make_job(
    config: "RunConfig", cluster: "ClusterSection", task: "type[Task] | None", arguments: tuple[str, ...]
) -> "Job":
    """What ``drawbar train ARGUMENTS`` is on the nodes."""
    from drawbar.launch.job import Job

    processes = config.launch.nproc if config.launch.nproc != "auto" else cluster.gpus_per_node or 1
    program = ("-m", "drawbar") if task is None else (str(Path(sys.argv[0]).absolute()),)
    settings = (*arguments, f"launch.nproc={processes}")
    words = ("--", *settings) if settings[0].startswith("-") else settings
    return Job(
        name=config.run.name,
        argv=(cluster.python or sys.executable, *program, "train", *words),
        workdir=Path.cwd(),
        run_dir=config.run_dir.absolute(),
        nodes=cluster.nodes,
        processes=processes,
        grace=max(Job.grace, config.launch.roll_call_seconds + 30),
    )
