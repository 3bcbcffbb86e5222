"""Ctrl-C when a command prints its error, or is done, and the ending interpreter still calls libraries."""

import signal
import subprocess
import sys

PROGRAM = """
import atexit, os, signal, sys, time

def slow_end():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)

if IGNORED:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    slow_end = lambda: os.kill(os.getpid(), signal.SIGINT)
atexit.register(slow_end)
sys.argv = ["drawbar", "--version"]
from drawbar.cli import run
run()
"""


def end(ignored: bool) -> "subprocess.CompletedProcess[str]":
    """A command that gets Ctrl-C in a function that it calls at its end."""
    program = PROGRAM.replace("IGNORED", str(ignored))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_it_ends_without_a_traceback() -> None:
    done = end(ignored=False)
    assert done.stdout.startswith("drawbar ")
    assert done.stderr == ""
    assert done.returncode == -signal.SIGINT


def test_what_nohup_ignores_stays_ignored() -> None:
    assert end(ignored=True).returncode == 0


REPORT = """
import os, signal, sys
import click
import drawbar.cli

def interrupted_echo(text, **options):
    click.echo = echo
    os.kill(os.getpid(), signal.SIGINT)
    echo(text, **options)

echo, click.echo = click.echo, interrupted_echo
sys.argv = ["drawbar", "config", "show", "nowhere.yaml"]
drawbar.cli.run()
"""


def test_while_an_error_is_printed() -> None:
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
