"""``drawbar prepare``: what it prints, and that training then encodes nothing."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.commands.prepare_data import padding_share
from drawbar.data.loader import MicroBatchSize
from drawbar.data.sampler import Grouped, InOrder, Shuffled
from drawbar.data.source_stream import SplitFilter
from drawbar.data.tokenizer import train_byte_bpe
from harness import Finished, run_cli
from messages import check_one_message

CLASSES = """
task: {type: sequence_classification, model: bert, labels: [0, 1], tokenizer: words}
data: {train: train.jsonl, sequence_length: 32}
train: {steps: 1}
"""

UNPACKED = """
import drawbar

class Unpacked(drawbar.CausalLM):
    label_placement = None
"""

IMAGES = """
import numpy as np, torch
import drawbar

class Images(drawbar.Task):
    def records(self, split):
        return [{"brightness": i} for i in range(20)]

    def encode(self, record, train):
        return {"pixels": np.full((4, 4), record["brightness"], dtype=np.float32), "labels": record["brightness"] % 2}
"""


def prepare(project: Path, *settings: str, code: int = 0) -> Finished:
    done = run_cli("prepare", "config.yaml", *settings, cwd=project)
    assert done.code == code, done.out + done.err
    return done


def table(out: str, row: str) -> list[str]:
    """The numbers behind the name of a row."""
    found = re.search(rf"^{re.escape(row)}  +(.+)$", out, re.MULTILINE)
    assert found, f"no {row!r} in\n{out}"
    return re.split(r"  +", found[1])


def cached(project: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file of the cache, but for locks and the digests of files, which come when these are some
    seconds old."""
    files = (path for path in (project / "runs" / ".cache").rglob("*") if path.name != "digests.json")
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files if path.suffix != ".lock"}


def test_training_finds_what_was_prepared(project: Path) -> None:
    """The tokenizer is trained by both, and both find the same."""
    out = prepare(project).out
    before = cached(project)
    assert {name.split("-")[0] for name in before if "-" in name} == {"train", "validation"}
    assert not (project / "runs" / "tiny").exists()
    assert table(out, "records") == ["90", "17"]
    done = run_cli("train", "config.yaml", cwd=project)
    assert done.code == 0, done.err
    assert cached(project) == before
    prepare(project)  # now with the tokenizer that the run keeps
    assert cached(project) == before


CLEANED = """
import drawbar
from words.clean import clean

class Cleaned(drawbar.CausalLM):
    def encode(self, record, train):
        return super().encode({"text": clean(record["text"])}, train)
"""


def test_a_change_in_an_imported_helper_is_encoded(project: Path) -> None:
    """The task is in one folder, its helper in another one beside it."""
    for name, text in {"tasks/mine.py": CLEANED, "words/clean.py": "def clean(text):\n    return text\n"}.items():
        (project / name).parent.mkdir()
        (project / name).write_text(text)
    settings = ("task.type=tasks.mine:Cleaned", "task.tokenizer.vocab_size=257")
    first = prepare(project, *settings)
    assert "train: encoding; no train data are cached" in first.err
    again = prepare(project, *settings)
    assert "train: taken from the cache" in again.err
    assert table(again.out, "tokens") == table(first.out, "tokens")
    (project / "words" / "clean.py").write_text("def clean(text):\n    return text[:1]\n")
    changed = prepare(project, *settings)
    assert "train: encoding; changed since the cached data: words/clean.py" in changed.err
    assert table(changed.out, "longest") == ["3", "3"]


def test_data_are_rebuilt_where_that_is_asked_for(project: Path) -> None:
    prepare(project)
    before = cached(project)
    done = prepare(project, "data.rebuild=true")
    assert "validation: encoding anew, as data.rebuild says" in done.err
    after = cached(project)
    assert after.keys() == before.keys()
    assert not [name for name in before if name.startswith("train-") and after[name] == before[name]]


def test_what_it_prints(project: Path) -> None:
    lines = ["the load " * n for n in (1, 2, 3, 30)]
    (project / "train.txt").write_text("\n".join(lines))
    batches = ("train.global_batch=2", "train.micro_batch=2")
    settings = ("task.tokenizer.vocab_size=257", "data.sequence_length=64", *batches)
    out = prepare(project, *settings).out
    lengths = [len(line.encode()) + 2 for line in lines[:3]]  # a token a byte, and both ends
    total = sum(lengths) + len(lines[3]) + 2
    assert table(out, "records")[0] == "4"
    windows = -(-(len(lines[3]) + 1) // 63)  # each begins with the last token of the one before
    assert table(out, "samples")[0] == str(3 + windows)
    assert table(out, "tokens")[0] == f"{total + windows - 1:,}"
    assert table(out, "longest")[0] == "64"
    assert "<- data.sequence_length = 64" in out
    padding = {name: float(table(out, name)[2].rstrip("%")) for name in ("padded", "grouped", "packed")}
    assert padding["packed"] < padding["padded"]
    steps = table(out, "padded")[1]
    assert out.rstrip().endswith(f"{steps} steps per epoch")
    assert re.search(r"^cache: runs/\.cache, ", out, re.MULTILINE)


def test_the_steps_are_those_of_the_batching_that_is_configured(project: Path) -> None:
    out = prepare(project, "data.batching=packed").out
    assert table(out, "packed")[1] != table(out, "padded")[1]
    assert out.rstrip().endswith(f"{table(out, 'packed')[1]} steps per epoch")


def test_bad_and_dropped_and_truncated(project: Path) -> None:
    records = ['{"text": "a b", "label": 0}', '{"text": "a c", "label": 1}', '{"text"', '{"label": 1}']
    (project / "train.jsonl").write_text("\n".join([*records, '{"text": "%s", "label": 1}' % ("long " * 40)]))
    (project / "config.yaml").write_text(CLASSES)
    train_byte_bpe([], 257).save_pretrained(str(project / "words"))
    done = prepare(project, code=2)
    check_one_message(done.out + done.err, "train.jsonl:3", "data.on_bad_record=skip")
    for _ in range(2):  # from the cache it says the same
        done = prepare(project, "data.on_bad_record=skip")
        assert table(done.out, "records") == ["5"]
        assert table(done.out, "bad records") == ["2"]
        assert table(done.out, "samples") == ["3"]
        assert table(done.out, "truncated samples") == ["1 (33.3%)"]
        assert "train.jsonl:3: the line is not valid JSON" in done.err
        assert "train.jsonl:4: the record has no 'text'" in done.err


def test_a_stream_is_not_prepared(project: Path) -> None:
    done = prepare(project, "data.streaming=true")
    assert "train: nothing to prepare" in done.out
    assert table(done.out, "records") == ["17"]
    assert "steps per epoch" not in done.out
    assert not [name for name in cached(project) if name.startswith("train")]
    done = prepare(project, "data.streaming=true", "data.validation=null", "eval.every=null", code=2)
    check_one_message(done.out + done.err, "nothing to prepare", "data.streaming")
    done = prepare(project, "data.streaming=true", "--show", "1", code=2)
    check_one_message(done.out + done.err, "--show", "data.streaming")


def test_a_validation_share_and_test_data(project: Path) -> None:
    settings = ("data.validation=null", "data.validation_share=0.2", "data.test=valid.txt")
    train, validation, test = map(int, table(prepare(project, *settings).out, "records"))
    assert train + validation == 90
    assert validation
    assert test == 17


def test_a_share_that_equal_records_make_much_larger(project: Path) -> None:
    validation = SplitFilter(0.1, "validation")
    texts = [f"text number {number} of these" for number in range(100)]
    ours = next(text for text in texts if validation.has(text.encode()))
    other = next(text for text in texts if not validation.has(text.encode()))
    settings = ("data.train=few.txt", "data.validation=null", "data.validation_share=0.1", "data.batching=padded")
    (project / "few.txt").write_text(f"{ours}\n" * 122 + f"{other}\n" * 78)
    done = prepare(project, *settings)
    assert table(done.out, "records") == ["78", "122"]
    trained = run_cli("train", "config.yaml", *settings, "train.steps=3", cwd=project)
    assert trained.code == 0, trained.err
    for said in (done.err, trained.err):
        assert said.count("data.validation_share=0.1, but 122 of 200 records (61.0%) are for validation") == 1, said
        assert "few records here are distinct" in said

    limited = prepare(project, *settings, "data.limit.validation=100")  # on purpose
    assert "data.validation_share=0.1, but" not in limited.err
    (project / "few.txt").write_text("".join(f"{text}\n" for text in texts))
    assert "data.validation_share=0.1, but" not in prepare(project, *settings).err


def test_samples_that_are_not_text(project: Path) -> None:
    (project / "mine.py").write_text(IMAGES)
    (project / "config.yaml").write_text(
        "{task: {type: 'mine:Images'}, data: {train: none}, train: {steps: 1, global_batch: 8}}"
    )
    out = prepare(project).out
    assert table(out, "samples") == ["20"]
    assert "tokens" not in out
    assert out.rstrip().endswith("3 steps per epoch")
    assert any(name.startswith("train") for name in cached(project))


def test_a_task_that_cannot_be_packed(project: Path) -> None:
    (project / "mine.py").write_text(UNPACKED)
    done = prepare(project, "task.type=mine:Unpacked")
    assert table(done.out, "grouped")
    assert not re.search("^packed", done.out, re.MULTILINE)
    assert "data.batching=packed is not possible: Unpacked does not say where its labels are" in done.err
    done = prepare(project, "task.type=mine:Unpacked", "data.batching=packed", code=2)
    check_one_message(done.out + done.err, "Unpacked does not say where its labels are")


def test_what_training_would_refuse_is_refused(project: Path) -> None:
    done = prepare(project, "train.epochs=1", "train.steps=3", code=2)
    check_one_message(done.out + done.err, "train.steps", "train.epochs")
    assert not os.path.exists(project / "runs")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 4))
def test_padding_is_what_fills_each_forward_up(lengths: list[int], batch: int, rows: int) -> None:
    found = padding_share(InOrder(len(lengths)), np.array(lengths), batch, MicroBatchSize(rows=rows))
    used = computed = 0
    for start in range(0, len(lengths), batch):
        longest_first = sorted(lengths[start : start + batch], reverse=True)
        for at in range(0, len(longest_first), rows):
            part = longest_first[at : at + rows]
            used, computed = used + sum(part), computed + len(part) * part[0]
    assert found == pytest.approx(1 - used / computed)


def test_grouping_saves_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, size=500)
    shuffled = Shuffled(500, seed=0)
    whole = MicroBatchSize(rows=32)
    padded = padding_share(shuffled, lengths, 32, whole)
    grouped = padding_share(Grouped(shuffled, lengths, 32, seed=0), lengths, 32, whole)
    assert grouped < 0.1 < 0.4 < padded
