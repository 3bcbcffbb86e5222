"""The commands, one file each; light to import."""

import drawbar.cli  # noqa: F401 - it imports them, and would meet half a module where one of them is imported first
