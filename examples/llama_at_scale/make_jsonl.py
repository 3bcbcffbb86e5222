"""Write train.jsonl and valid.jsonl: the docstrings of Python's own library, one document a line."""

import ast
import json
import sysconfig
from pathlib import Path


def docstrings(folder: Path) -> list[str]:
    """Every docstring of some length in the modules of ``folder``, in a fixed order."""
    found = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) > 80:
                    found.append(text)
    return found


def main() -> None:
    texts = docstrings(Path(sysconfig.get_paths()["stdlib"]))
    held_out = texts[::20]
    for name, part in (("train", [text for text in texts if text not in held_out]), ("valid", held_out)):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        Path(f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}.jsonl: {len(lines):,} documents, {sum(map(len, part)):,} characters")


if __name__ == "__main__":
    main()
