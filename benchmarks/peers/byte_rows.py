"""Language modelling of bytes in rows of one length: data that is on every machine, and whose batches are full."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

import drawbar
from drawbar.data.tokenizer import train_byte_bpe


class ByteRows(drawbar.CausalLM):
    """A record's text is as many tokens as it has characters."""

    def build_tokenizer(self) -> Any:
        return train_byte_bpe([], 257)  # for what it says of padding: the tokens are bytes

    def encode(self, record: dict[str, Any], train: bool) -> list[dict[str, Any]]:
        tokens = np.frombuffer(record["text"].encode("latin-1"), np.uint8).astype(np.int32)
        return [{"input_ids": tokens, "labels": tokens}]


def write_rows(path: Path, rows: int, length: int) -> Path:
    """JSONL of that many rows, from the source of Python's own library.

    Raises:
        ValueError: it is not that large.
    """
    written, rest = 0, ""
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            rest += source.read_bytes().decode("latin-1")
            while len(rest) >= length:
                file.write(json.dumps({"text": rest[:length]}) + "\n")
                rest, written = rest[length:], written + 1
                if written == rows:
                    return path
    raise ValueError(f"Python's library has {written} rows of {length} bytes, not {rows}")
