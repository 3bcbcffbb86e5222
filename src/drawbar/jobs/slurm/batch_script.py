"""A job as Slurm's sbatch takes it: a bash script.

What the user wrote reaches the shell only through ``shlex.quote`` (except ``cluster.setup``), and sbatch's own parser
only if it holds nothing that this parser would read differently.
"""

import re
import shlex
import signal
from pathlib import Path

from drawbar.config.io.user_code import SNAPSHOT
from drawbar.distributed.interrupt import SIGNAL_SECONDS
from drawbar.errors import ExitCode, UserError
from drawbar.jobs.job import Job
from drawbar.jobs.node.each_node import CONFIG
from drawbar.jobs.node.requeue import EXCLUDE, GAVE_UP, ONLY_IF_LOST, REQUEUED
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.slurm.allocation import OWN_JOB

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")

_CONFIG = """
# The job uses the configuration as it was submitted. Each node writes it to a file, as nodes may have own disks. It
# reaches them in base64, which has no commas and quotes: every container passes it on unchanged.
drawbar_config="$drawbar_run/launch/config-$drawbar_job.yaml"
{variable}=$(printf %s "$drawbar_yaml" | base64 --wrap=0)
export {variable}"""
_BEGIN = """
export {own_job}="$SLURM_JOB_ID" {signal_variable}={signal_seconds}
# A file that says how the job ended, for when Slurm has forgotten the job; never half written.
drawbar_end="$drawbar_run/launch/ended-$drawbar_job.json"
# shellcheck disable=SC2317  # the trap calls it
ended() {{
  printf '{{"code": %d, "time": %d, "restarts": %d}}\\n' "$?" "$(date +%s)" "${{SLURM_RESTART_COUNT:-0}}" \\
    > "$drawbar_end.tmp" && mv "$drawbar_end.tmp" "$drawbar_end"
}}
mkdir -p "$drawbar_run/launch" || exit
rm -f "$drawbar_end"
trap ended EXIT
trap 'exit {terminated}' TERM"""
_RESTARTS = '{srun_one_task}{python} -m drawbar.jobs.node.restart "$drawbar_run" "$drawbar_job" || exit\n\n'

_BODY = """
# USR1 comes before the time limit, to this script alone: it goes on to the ranks, which save and end with {requeue}.
# TERM comes from scancel or the scheduler, which tells the ranks itself, and decides whether the job goes on.
# INT comes from a terminal, and to srun as well.
told='' signals=0 early='' step=''
# shellcheck disable=SC2317  # the traps call it
note() {{
  told=$1
  signals=$((signals + 1))
  if [ "$1" != USR1 ]; then return; fi
  if [ -n "$step" ]; then kill -s "$1" "$step"; else early=$1; fi
}}
trap 'note USR1' USR1
trap 'note TERM' TERM
trap 'note INT' INT

{restarts}# The first node of this job, as Slurm reaches it; it chooses the address and a free port.
DRAWBAR_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export DRAWBAR_NODES
head=${{DRAWBAR_NODES%%$'\\n'*}}
address=$(scontrol show node "$head" --oneliner | sed -n 's/.* NodeAddr=\\([^ ]*\\) .*/\\1/p')
endpoint=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \\
  {python} -m drawbar.jobs.node.first_node "${{address:-$head}}" "$SLURM_JOB_ID"{interface}) || exit

if [ "$told" = TERM ] || [ "$told" = INT ]; then exit {terminated}; fi
srun --overlap --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 {cpus}\\
  --kill-on-bad-exit=0 --wait={grace} {at_terminal}\\
  {python} -m drawbar.jobs.node.each_node "$endpoint" "$drawbar_config" \\
  {command} "$drawbar_config" {settings} &
step=$!
if [ -n "$early" ]; then kill -s "$early" "$step"; fi

# `wait` also ends when a signal comes: the exit code is that of a wait during which none came.
seen=-1
while [ "$signals" != "$seen" ]; do
  seen=$signals
  wait "$step"
  code=$?
done
"""

_END = """
# {requeue}: the run has saved. {killed}: USR1 came before a rank could save, which costs nothing but time.
case "$told:$code" in
  :{requeue} | USR1:{requeue} | USR1:{killed})
    {then}
    ;;
esac
exit "$code"
"""
_BAD_NODES = """
# Nodes that did not answer, were lost, or do not work are named in launch/bad-nodes.json.
if [ "$code" != 0 ] && [ -z "$told" ]; then
  {python} -m drawbar.jobs.node.requeue "$drawbar_run" "$drawbar_job" {mode}
  case $? in
    {back}) trap - EXIT ;;
    {ends}) code={failed} ;;
  esac
fi
"""
_REQUEUE = """\
echo "drawbar: job $drawbar_job was interrupted (exit code $code) and goes back into the queue"
    scontrol requeue "$drawbar_job" && trap - EXIT"""
_NO_REQUEUE = """\
echo "drawbar: job $SLURM_JOB_ID was interrupted (exit code $code); submit the run again, and it goes on\""""


def render(job: Job) -> str:
    """The script, which ends with the exit code of the run.

    Raises:
        UserError: a name or a path that sbatch would read as something else.
    """
    cluster, python, srun_one_task = job.cluster, shlex.quote(job.python), ""
    if job.container is not None:
        python = f'"${{container[@]}}" {python}'
        if job.container.runtime == "pyxis":  # only srun knows it
            srun_one_task = "srun --overlap --nodes=1 --ntasks=1 "
    shell = "#!/bin/bash -l" if cluster.modules else "#!/bin/bash"  # a login shell knows the command module
    what = f"Sweep {job.name}: {len(job.elements)} runs, each" if job.elements else f"Run {job.name}"
    parts = [shell, f"# {what} on {_count(job.nodes, 'node')}; made by drawbar submit."]
    parts += [f"#SBATCH {option}" for option in _options(job, cluster)]
    parts += ["", *_run_lines(job), _CONFIG.format(variable=CONFIG), *_code_lines(job)]
    begin = _BEGIN.format(
        own_job=OWN_JOB,
        signal_variable=SIGNAL_SECONDS,
        signal_seconds=cluster.signal_seconds,
        terminated=128 + signal.SIGTERM,
    )
    parts.append("" if job.allocation is not None else begin)  # those of a job that Slurm queues
    parts += [f"module load {shlex.quote(module)} || exit" for module in cluster.modules]
    variables = {**job.environment, **cluster.environment}
    parts += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    parts += [*cluster.setup, *(job.container.script() if job.container else []), ""]
    body = _BODY.format(
        requeue=int(ExitCode.REQUEUE),
        terminated=128 + signal.SIGTERM,
        python=python,
        restarts=_RESTARTS.format(srun_one_task=srun_one_task, python=python) if job.allocation is None else "",
        nodes=job.nodes,
        # since Slurm 22.05, srun does not take --cpus-per-task over from the job
        cpus=f"--cpus-per-task={cluster.cpus_per_task} " if cluster.cpus_per_task else "",
        grace=job.grace,
        interface=f" {shlex.quote(cluster.interface)}" if cluster.interface else "",
        # so srun passes Ctrl-C on to the ranks at once; else the first Ctrl-C would only print the state of tasks
        at_terminal="" if job.allocation is None else "--disable-status ",
        command=shlex.join(job.argv),
        settings='"${drawbar_settings[@]}"' if job.elements else shlex.join(job.settings),
    )
    then = _REQUEUE if cluster.requeue else _NO_REQUEUE
    end = _END.format(requeue=int(ExitCode.REQUEUE), killed=128 + signal.SIGUSR1, then=then)
    return "\n".join(parts) + body + _requeue_after_bad_nodes(job) + end


def _requeue_after_bad_nodes(job: Job) -> str:
    """The script's lines for a job that failed with bad nodes (see ``jobs.node.requeue``); empty if the job does not
    go back into the queue, and in a container, where Slurm's commands are missing."""
    cluster = job.cluster
    if job.nodes == 1 or not cluster.requeue or job.allocation is not None or job.container is not None:
        return ""
    mode = EXCLUDE if cluster.exclude_bad_nodes else ONLY_IF_LOST
    python, failed = shlex.quote(job.python), int(ExitCode.FAILED)
    return _BAD_NODES.format(python=python, mode=mode, back=REQUEUED, ends=GAVE_UP, failed=failed)


def _run_lines(job: Job) -> list[str]:
    """Which run it is, and its configuration."""

    def run(job: Job) -> list[str]:
        return [f"drawbar_run={shlex.quote(str(job.run_dir))}", f"drawbar_yaml={shlex.quote(job.config)}"]

    if not job.elements:
        return ["drawbar_job=$SLURM_JOB_ID", *run(job)]
    # the last element has the SLURM_JOB_ID of the whole array: requeueing that would requeue all elements
    lines = ['drawbar_job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"', 'case "$SLURM_ARRAY_TASK_ID" in']
    for number, element in enumerate(job.elements):
        own = [*run(element), f"drawbar_settings=({shlex.join(element.settings)})", ";;"]
        lines += [f"  {number})", *(f"    {line}" for line in own)]
    return [*lines, "esac"]


def _code_lines(job: Job) -> list[str]:
    """Which code it was submitted with, and where the copy of it is."""
    # a job that submits another one must not pass on its copy
    copy = f"unset {SNAPSHOT}" if job.snapshot is None else f"export {SNAPSHOT}={shlex.quote(str(job.snapshot))}"
    if job.version is None:
        return [copy]
    return [f"echo {shlex.quote(f'drawbar: submitted with the code of {job.version}')}", copy]


def log_path(job: Job, number: str) -> Path:
    """Where Slurm writes what the job, or element, prints, all its restarts in one file."""
    return job.folder / f"slurm-{number}.log"


def _options(job: Job, cluster: ClusterSection) -> list[str]:
    """The options of sbatch, as it reads them from a script."""
    if not _NAME.fullmatch(job.name):
        raise UserError(
            f"{job.name!r} cannot be the name of a job",
            where="run.name",
            remedy="use letters, digits, dots, dashes and underscores",
        )
    given: dict[str, str | int | bool | None] = {
        "job-name": job.name,
        "chdir": _plain(job.workdir),
        # sbatch fills in %j and the like
        "output": f"{_plain(job.folder).replace('%', '%%')}/slurm-{'%A_%a' if job.elements else '%j'}.log",
        "open-mode": "append",
        "requeue" if cluster.requeue else "no-requeue": True,
        "signal": f"B:USR1@{cluster.signal_seconds}",
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cluster.cpus_per_task,
        "gres": _gres(cluster),
        "partition": cluster.partition,
        "account": cluster.account,
        "time": cluster.time,
        "array": _array(job),
        **{name: value for name, value in cluster.options.items() if name != "gres"},
    }
    found = []
    for name, value in given.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None and value is not False:
            found.append(f"--{name}={shlex.quote(str(value))}")
    return found


def _gres(cluster: ClusterSection) -> str | None:
    gpus = "" if cluster.gpus_per_node is None else f"gpu:{cluster.gpus_per_node}"
    return ",".join(filter(None, (gpus, str(cluster.options.get("gres") or "")))) or None


def _array(job: Job) -> str | None:
    if not job.elements:
        return None
    return f"0-{len(job.elements) - 1}" + (f"%{job.at_once}" if job.at_once else "")


def _plain(path: Path) -> str:
    """A path that sbatch reads as it is written.

    sbatch knows quotes, but it takes a backslash for an escape even between them, and a line's end for the end.
    """
    if re.search(r"[\x00-\x1f\x7f\\]", str(path)):
        raise UserError(
            f"Slurm cannot take a path with backslashes or control characters: {str(path)!r}",
            where="run.dir, or the current folder",
            remedy="rename the folder",
        )
    return str(path)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"
