"""``python -m drawbar``: the same program as ``drawbar``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, which ``-m`` has put there: a click.py of the user's is not click

from drawbar.cli import run

run()
