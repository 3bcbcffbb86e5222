"""Pairs from Python's own library: a function's signature, and the first line of its docstring. No download."""

import argparse
import ast
import itertools
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def pairs() -> Iterator[dict[str, str]]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                yield {"source": f"{node.name}({ast.unparse(node.args)})", "target": docstring.splitlines()[0]}


parser = argparse.ArgumentParser()
parser.add_argument("--limit", type=int, help="write no more pairs than this")
found = list(itertools.islice(pairs(), parser.parse_args().limit))
for name, part in (("valid", found[::20]), ("train", [pair for index, pair in enumerate(found) if index % 20])):
    text = "".join(json.dumps(pair) + "\n" for pair in part)
    Path(f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"{name}.jsonl: {len(part):,} functions")
