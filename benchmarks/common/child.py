"""The program of a fresh process: ``child.py SPEC RESULT`` runs a function and writes what it returns."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the packages of the suite, not this folder
    from importlib import import_module  # nothing that the measured function may import, or not, itself

    spec = json.loads(sys.argv[1])
    module, _, name = spec["function"].partition(":")
    found = getattr(import_module(module), name)(**spec["arguments"])
    Path(sys.argv[2]).write_text(json.dumps(found))
