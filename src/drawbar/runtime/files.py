"""Files that are whole or absent."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name, and rename it."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
