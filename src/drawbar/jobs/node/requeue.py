"""Runs at the end of a failed Slurm job: where the job has named bad nodes, puts it back into the queue
without them (``exclude``), or only if one of them was lost (``only-if-lost``).

    python -m drawbar.jobs.node.requeue RUN_DIRECTORY JOB exclude|only-if-lost

The exit code is the result of :func:`requeue`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from drawbar.jobs.slurm.queries import facts, read_nodes, slurm_output
from drawbar.launch.findings import NODE_IS_LOST, bad_nodes, restart_number
from drawbar.launch.rendezvous import launch_id_of

REQUEUED, GAVE_UP, NO_BAD_NODES = 0, 3, 1
"""Exit codes: the job went back, it ends because of its bad nodes, it has named none."""
EXCLUDE, ONLY_IF_LOST = "exclude", "only-if-lost"
"""Modes: queue the job without its bad nodes; or queue it only if a node was lost, as Slurm itself would do when it
finds out."""


def requeue(run_dir: Path, job: str, mode: str) -> int:
    """Put the job back into the queue, if ``mode`` says so and Slurm can. Returns ``REQUEUED``, ``GAVE_UP`` or
    ``NO_BAD_NODES``.

    Args:
        job: what Slurm requeues: of an array element ``ARRAY_INDEX``, though it has a job id of its own.
        mode: ``EXCLUDE`` or ``ONLY_IF_LOST``.
    """
    own = launch_id_of(os.environ["SLURM_JOB_ID"])
    reasons = bad_nodes(run_dir, own, restart_number())
    try:
        if reasons and mode == EXCLUDE:
            return _exclude(job, bad_nodes(run_dir, own))
        if any(NODE_IS_LOST in reason for reason in reasons.values()):
            print(f"drawbar: job {job} goes back into the queue: {'; '.join(reasons.values())}", flush=True)
            _scontrol("requeue", job)
            return REQUEUED
    except subprocess.CalledProcessError as error:
        print(f"error: job {job} could not go back into the queue: {error}", file=sys.stderr)
        print(f"  fix:   submit it again; if it is held, `scontrol release {job}`", file=sys.stderr)
    return GAVE_UP if reasons else NO_BAD_NODES


def _exclude(job: str, bad: Iterable[str]) -> int:
    """Put the job back into the queue without the bad nodes, unless too few nodes are left. Returns the exit code."""
    described = facts(slurm_output("scontrol", "show", "--oneliner", "job", job) or "")
    avoided = described.get("ExcNodeList", "(null)")
    excluded = ",".join([*sorted(bad), *([] if avoided == "(null)" else [avoided])])
    left = _nodes_left(described.get("Partition", ""), excluded)
    if left < int(described.get("NumNodes", "1").partition("-")[0]):
        print(f"error: without {excluded} there are {left} nodes, too few for job {job}; it ends here", file=sys.stderr)
        print("  fix:   mend those nodes, or submit for fewer (--nodes)", file=sys.stderr)
        return GAVE_UP
    print(f"drawbar: job {job} goes back into the queue, without {excluded}", flush=True)
    _requeue_without(job, excluded)
    return REQUEUED


def _requeue_without(job: str, nodes: str) -> None:
    """Requeue the job in the held state, exclude the nodes, release it: Slurm refuses the change for a running job."""
    _scontrol("requeuehold", job)
    try:
        _scontrol("update", f"JobId={job}", f"ExcNodeList={nodes}")
    finally:
        _scontrol("release", job)


def _scontrol(*arguments: str) -> None:
    """Raises CalledProcessError if Slurm refuses."""
    subprocess.run(["scontrol", *arguments], check=True)


def _nodes_left(partitions: str, excluded: str) -> int:
    """How many nodes of the job's partitions it could still use."""
    nodes = {node.name for name in partitions.split(",") for node in read_nodes(name) or ()}
    return len(nodes - set((slurm_output("scontrol", "show", "hostnames", excluded) or "").split()))


def main(arguments: list[str]) -> int:
    run_dir, job, mode = arguments
    return requeue(Path(run_dir), job, mode)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm ends what is left of the job as soon as it is requeued
    sys.exit(main(sys.argv[1:]))
