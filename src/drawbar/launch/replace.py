"""Runs at the end of a failed Slurm job: where the job has named bad nodes, it goes back into the queue.

    python -m drawbar.launch.replace RUN_DIRECTORY JOB [exclude]

With ``exclude`` it goes back without those nodes; otherwise only where a node was lost, as Slurm itself would do when
it finds out. Exit code 0: it is in the queue again. 1: it has ended.
"""

import signal
import subprocess
import sys
from pathlib import Path

from drawbar.launch.bad_nodes import LOST, attempt, bad_nodes
from drawbar.launch.meeting import job_name
from drawbar.launch.partitions import ask, facts, read_nodes


def main(arguments: list[str]) -> int:
    run_dir, job, *exclude = Path(arguments[0]), arguments[1], *arguments[2:]
    now = bad_nodes(run_dir, job_name(job), attempt())
    if not now:
        return 1
    if not exclude:
        if not any(LOST in reason for reason in now.values()):
            return 1
        scontrol("requeue", job)
        print(f"drawbar: job {job} goes back into the queue: {', '.join(now.values())}", flush=True)
        return 0
    described = facts(ask("scontrol", "show", "--oneliner", "job", job) or "")
    excluded = _excluded(set(bad_nodes(run_dir, job_name(job))), described.get("ExcNodeList", ""))
    left = _nodes_left(described.get("Partition", ""), excluded)
    if len(left) < int(described["NumNodes"].partition("-")[0]):
        print(f"error: without {excluded} the job has {len(left)} nodes left, which is too few", file=sys.stderr)
        print("  fix:   mend those nodes, or submit with fewer (--nodes)", file=sys.stderr)
        return 1
    print(f"drawbar: job {job} goes back into the queue, without {excluded}", flush=True)
    _requeue_without(job, excluded)
    return 0


def _requeue_without(job: str, nodes: str) -> None:
    """Slurm lets nobody change which nodes a job avoids while it runs: so it is held in between."""
    scontrol("requeuehold", job)
    try:
        scontrol("update", f"JobId={job}", f"ExcNodeList={nodes}")
    finally:
        scontrol("release", job)


def scontrol(*arguments: str) -> None:
    """Raises CalledProcessError where Slurm refuses."""
    subprocess.run(["scontrol", *arguments], check=True)


def _excluded(bad: set[str], avoided: str) -> str:
    """Every node that the job has named, and those that it avoids already."""
    return ",".join([*sorted(bad), *([avoided] if avoided not in ("", "(null)") else [])])


def _nodes_left(partitions: str, excluded: str) -> set[str]:
    """Nodes of the job's partitions that it could still use."""
    members = {node.name for name in partitions.split(",") for node in read_nodes(name) or ()}
    return members - set((ask("scontrol", "show", "hostnames", excluded) or "").split())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm ends what is left of the job as soon as it is requeued
    sys.exit(main(sys.argv[1:]))
