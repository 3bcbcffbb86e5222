"""``drawbar jobs``."""

import time
from pathlib import Path

import click


@click.command(
    short_help="List submitted jobs and how far their runs are.",
    epilog="""\b
Examples:
  drawbar jobs                 what waits, what runs, and what ended in the last 24 hours
  drawbar jobs --all           and all before them

\b
The list is kept in ~/.local/state/drawbar/jobs.jsonl, and in the folder launch/ of each run.
""",
)
@click.option(
    "--all", "show_all", is_flag=True, help="Also the jobs that ended, or were submitted, more than 24 hours ago."
)
def jobs(show_all: bool) -> None:
    """List the jobs that you have submitted: their states, and how far their runs are."""
    from drawbar.jobs.launchers import ask_status_where_possible
    from drawbar.jobs.records import UNKNOWN, JobEnd, is_recent, read, user_file
    from drawbar.jobs.run_jobs import run_job
    from drawbar.tracking.run_view import read_run
    from drawbar.tracking.table import print_table

    known = {(record.launcher, record.number): record for record in read(user_file())}  # launchers reuse numbers
    now, wanted = time.time(), set(known)
    if not show_all:  # an old job without an end may still wait
        ends = {key: JobEnd.read(record) for key, record in known.items()}
        wanted = {key for key, end in ends.items() if end is None or is_recent(known[key], end, now)}
    rows = []
    statuses, errors = ask_status_where_possible(record for key, record in known.items() if key in wanted)
    for error in errors:
        click.echo(f"warning: some jobs are {UNKNOWN}: {error.what}", err=True)
    for status in statuses:
        record = status.record
        if show_all or status.is_active or is_recent(record, JobEnd.read(record), now):
            step = read_run(Path(record.run_dir), run_job(record, status)).progress.step_of_total
            rows.append([record.number, record.run, status.state, status.remarks, step, status.clock])
    if rows:
        print_table("Jobs", ["job", "run", "state", "", "step", "time/limit"], rows, left=4)
    else:
        click.echo("no jobs; `drawbar jobs --all` shows older ones" if known and not show_all else "no jobs")
