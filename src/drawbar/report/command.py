"""``drawbar report``."""

from pathlib import Path

import click

from drawbar.cli.complete_words import complete_run

FILE = "report.html"


@click.command(
    short_help="Write runs as one HTML page: curves, scores, events.",
    epilog="""\b
Examples:
  drawbar report runs/demo                         writes runs/demo/report.html
  drawbar report runs/demo --open                  and opens it in a browser
  drawbar report runs/demo runs/slower             both runs in one page: ./report.html
  drawbar report runs/demo --to demo.html

\b
The page is one file, which asks nothing of any network. It needs plotly:
pip install "drawbar[report]"
""",
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_run)
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"The file to write. Default: {FILE} in the folder of the run; of several runs, in this folder.",
)
@click.option("--open", "show", is_flag=True, help="Open the report in a browser.")
def report(runs: tuple[str, ...], target: Path | None, show: bool) -> None:
    """Write one HTML page about each RUN (a run directory): curves, scores, predictions, events and settings.

    Of several runs, the curves are overlaid, and the settings that differ are compared. An older report is replaced;
    any other file is not.
    """
    from drawbar.config.io.source import run_folder
    from drawbar.report.page import check_target
    from drawbar.report.report_page import write_report

    folders = list(dict.fromkeys(run_folder(run) for run in runs))
    if target is None:
        target = Path(runs[0]) / FILE if len(folders) == 1 else Path(FILE)
    check_target(target, "--to")
    write_report(folders, target)
    click.echo(f"report: {target}")
    if show:
        _open(target)


def _open(target: Path) -> None:
    import webbrowser

    if not webbrowser.open(target.absolute().as_uri()):
        click.echo("no browser was found here: open the file by hand", err=True)
