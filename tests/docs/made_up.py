"""The data that the pages speak of: small, made up, and the same at every run."""

import json
from collections.abc import Iterable
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from conftest import write_text

THINGS = ["room", "soup", "view", "garden", "host"]
GOOD, BAD = ["warm", "lovely", "bright"], ["cold", "dull", "dirty"]
GERMAN = {"room": "das Zimmer", "soup": "die Suppe", "view": "die Aussicht", "garden": "der Garten", "host": "der Wirt"}
PEOPLE = ["Ada", "Emil", "Ida", "Otto", "Uwe"]
PLACES = ["Ulm", "Kiel", "Bonn"]


def _json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _reviews(count: int) -> list[tuple[str, str]]:
    """(text, label)"""
    labels = dict.fromkeys(GOOD, "positive") | dict.fromkeys(BAD, "negative")
    said = islice(cycle(product(THINGS, labels)), count)
    return [(f"the {thing} was {word}{' indeed' * (n % 3)}", labels[word]) for n, (thing, word) in enumerate(said)]


def write_data(folder: Path) -> None:
    """Every data file that docs/tasks.md and docs/data.md name."""
    write_text(folder / "train.txt", 120, seed=1)
    write_text(folder / "valid.txt", 20, seed=2)
    for name, reviews in (("train", _reviews(120)), ("valid", _reviews(30)), ("test", _reviews(20))):
        rows = "".join(f"{text}\t{label}\n" for text, label in reviews)
        (folder / f"{name}.tsv").write_text(f"text\tlabel\n{rows}", encoding="utf-8")
    (folder / "new.tsv").write_text("text\nthe room was lovely\nthe soup was cold indeed\n", encoding="utf-8")
    (folder / "more.csv").write_text("sentence,stars\nthe room was warm,positive\n", encoding="utf-8")
    (folder / "bare.tsv").write_text("the view was dull\tnegative\n", encoding="utf-8")
    _json_lines(folder / "broken.jsonl", [{"text": "the road"}, {"text": "the hill"}])
    with (folder / "broken.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "the wind"\n{"text": "the village"}\n')

    for name, count in (("train", 60), ("valid", 12)):
        pairs = list(islice(cycle(product(PEOPLE, PLACES)), count))
        words = [(["who", "lives", "in", place, "?", person], place, person) for person, place in pairs]
        _json_lines(
            folder / f"{name}.entities.jsonl",
            ({"tokens": tokens, "tags": ["O", "O", "O", "B-PLACE", "O", "B-PERSON"]} for tokens, _, _ in words),
        )
        _json_lines(
            folder / f"{name}.questions.jsonl",
            ({"prompt": f"Who lives in {place}?\n", "completion": person} for _, place, person in words),
        )
        _json_lines(
            folder / f"{name}.pairs.jsonl",
            (
                {"prompt": f"Who lives in {place}?\n", "chosen": person, "rejected": other}
                for (_, place, person), other in zip(words, islice(cycle(PLACES), count), strict=True)
            ),
        )
        things = list(islice(cycle(THINGS), count))
        (folder / f"{name}.en").write_text("".join(f"the {thing}\n" for thing in things), encoding="utf-8")
        (folder / f"{name}.de").write_text("".join(f"{GERMAN[thing]}\n" for thing in things), encoding="utf-8")
        sentences = [f"{GERMAN[thing]}\tgerman\nthe {thing}\tenglish\n" for thing in things]
        (folder / f"{name}.languages.tsv").write_text("text\tlanguage\n" + "".join(sentences), encoding="utf-8")
    _json_lines(folder / "prompts.jsonl", ({"prompt": f"the {thing}"} for thing in ("driver", "engine")))
    answers = [{"prompt": "Who lives in Ulm?\n", "completion": who, "label": who in PEOPLE} for who in PEOPLE + PLACES]
    _json_lines(folder / "judged.jsonl", answers)
    _json_lines(folder / "test.answers.jsonl", ({"prompt": "Who lives in Ulm?\n", "chosen": who} for who in PEOPLE))
    _json_lines(folder / "asked.jsonl", ({"prompt": f"Who lives in {place}?\n"} for place in PLACES))
