"""How much of other trainers' published configurations `drawbar import` converts: the figures of docs/importing.md.

    python tools/import_rates.py FOLDER [FOLDER ...]

Each folder is a copy of a project, or of its examples: every YAML, JSON and TOML file in it whose keys say whose it is
counts. Files that name others (a DeepSpeed JSON, say) are read from the folder, as there. ``--reasons`` also counts why
keys were refused, ``--errors`` shows what an import that ends otherwise says.
"""

import argparse
import os
from collections import Counter, defaultdict
from pathlib import Path

from drawbar.errors import UserError
from drawbar.imports.conversion import Conversion, detect, load_source
from drawbar.imports.reading import read_keys
from drawbar.imports.writing import check

OUTCOMES = ("converted", "no effect", "no counterpart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--reasons", action="store_true", help="also count why keys were refused")
    parser.add_argument("--errors", action="store_true", help="also show errors other than refused keys")
    chosen = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for folder in [folder.absolute() for folder in chosen.folders]:
        os.chdir(folder)
        for path in sorted(path for path in Path().rglob("*") if path.suffix in (".yaml", ".yml", ".json", ".toml")):
            if not path.is_file() or path.stat().st_size > 100_000:  # data
                continue
            try:
                keys = read_keys(path)
            except UserError:
                continue  # not a file of keys
            name = detect(keys)
            if name is None:
                continue
            conversion = Conversion(keys, load_source(name)).convert()
            found = counts[load_source(name).title]
            found["files"] += 1
            found.update(entry.outcome for entry in conversion.entries.values())
            found["keys"] += len(conversion.entries)
            try:
                check(conversion)
                found["configurations"] += 1
            except UserError as error:
                found["refused"] += 1
                found["of these, for one key"] += len(conversion.refusals) == 1
                reasons.update(f"{load_source(name).title}: {entry.key}: {entry.text}" for entry in conversion.refusals)
                if chosen.errors and not conversion.refusals:
                    print(f"{path}: {error}\n")
    columns = ("files", "configurations", "refused", "of these, for one key", "keys", *OUTCOMES)
    print("| source | " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for title in sorted(counts, key=str.lower):
        print(f"| {title} | " + " | ".join(f"{counts[title][column]:,}" for column in columns) + " |")
    for reason, count in reasons.most_common(400) if chosen.reasons else ():
        print(count, reason)


if __name__ == "__main__":
    main()
