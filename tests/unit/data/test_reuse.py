"""Why samples are encoded anew: what has changed since the cached data."""

from pathlib import Path

from drawbar.data.cache import encode_cached, entry_folder, explain_cache_miss, is_cached, remove_cached
from drawbar.data.sources import read_list

MADE_OF = {"the records": "1", "the tokenizer": "2", "words/clean.py": "3"}


def encode(cache: Path, inputs: dict[str, str]) -> None:
    encode_cached(
        lambda: read_list([1, 2], str),  # type: ignore[list-item]
        lambda number: {"x": number},
        inputs=inputs,
        cache=cache,
        workers=0,
        name="train",
        on_bad_record="error",
        progress=None,
        timeout=60,
        eager=True,
    )


def test_what_has_changed_is_named(tmp_path: Path) -> None:
    assert explain_cache_miss(tmp_path, "train", MADE_OF) == f"no train data are cached in {tmp_path}"
    encode(tmp_path, {**MADE_OF, "the records": "7", "the tokenizer": "7"})
    encode(tmp_path, MADE_OF)
    assert is_cached(tmp_path, "train", MADE_OF)
    changed = {**MADE_OF, "words/clean.py": "4"}
    assert not is_cached(tmp_path, "train", changed)
    assert (
        explain_cache_miss(tmp_path, "train", changed) == "changed since the cached data: words/clean.py"
    )  # of the entry most like it
    assert str(explain_cache_miss(tmp_path, "train", {**MADE_OF, "words/new.py": "5"})).endswith(": words/new.py")
    assert explain_cache_miss(tmp_path, "validation", MADE_OF) == f"no validation data are cached in {tmp_path}"
    many = {f"{number}.py": "" for number in range(7)}
    assert str(explain_cache_miss(tmp_path, "train", {**MADE_OF, **many})).endswith(
        "0.py, 1.py, 2.py, 3.py, 4.py and 2 more"
    )


def test_the_data_of_another_job_are_not_called_changed(tmp_path: Path) -> None:
    def parts(value: str) -> dict[str, str]:
        return dict.fromkeys(("the records", "the tokenizer", "task.type", *"abcde"), value)

    encode(tmp_path, parts("1"))
    assert explain_cache_miss(tmp_path, "train", parts("2")) is None
    same_task = {**parts("2"), "task.type": "1"}
    assert explain_cache_miss(tmp_path, "train", same_task) is None
    same_both = {**same_task, "the records": "1"}  # nothing but code, settings and versions
    assert str(explain_cache_miss(tmp_path, "train", same_both)).endswith("the tokenizer, a, b, c, d and 1 more")
    few = {**parts("1"), "the records": "2", "task.type": "2"}
    assert str(explain_cache_miss(tmp_path, "train", few)).endswith(": the records, task.type")


def test_a_damaged_entry_says_nothing(tmp_path: Path) -> None:
    encode(tmp_path, MADE_OF)
    (entry_folder(tmp_path, "train", MADE_OF) / "meta.json").write_text("[]")
    assert explain_cache_miss(tmp_path, "train", {}) == f"no train data are cached in {tmp_path}"


def test_samples_that_are_removed_leave_nothing(tmp_path: Path) -> None:
    remove_cached(tmp_path, "train", MADE_OF)  # they need not be there
    encode(tmp_path, MADE_OF)
    remove_cached(tmp_path, "train", MADE_OF)
    assert not is_cached(tmp_path, "train", MADE_OF)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    encode(tmp_path, MADE_OF)
    assert is_cached(tmp_path, "train", MADE_OF)
