"""``python -m drawbar``: the same program as ``drawbar``."""

from drawbar.cli import run

run()
