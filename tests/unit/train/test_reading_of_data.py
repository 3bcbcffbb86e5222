"""What a start reads of its data, and what of it is in memory."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drawbar.config.schema.data_section import SourceSection
from drawbar.config.schema.run_config import DataSection, RunConfig, RunSection, TrainSection
from drawbar.data import cache, encode, packing
from drawbar.data.text_readers import JsonLines
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split
from drawbar.runtime.log import logger
from drawbar.tasks.task import Task
from drawbar.tracking.console import make_console
from drawbar.train import batches as train_data
from drawbar.train.batches import load_split, order_and_rows

RECORDS = 600


class Numbers(Task):
    label_placement = "token"

    def encode(self, record: dict[str, Any], train: bool) -> Any:
        return {"input_ids": [record["n"]] * (1 + record["n"] % 7)}


class Tracked(dict[str, Any]):
    """A record that can be seen to be alive."""


@pytest.fixture
def sources(tmp_path: Path) -> list[SourceSection]:
    """A third of the records, three times as heavy as the other two, one line of which is bad."""
    lines = [f'{{"n": {number}}}\n' for number in range(RECORDS)]
    (tmp_path / "a.jsonl").write_text("".join(lines[: RECORDS // 3]))
    (tmp_path / "b.jsonl").write_text("".join(["{not JSON\n", *lines[RECORDS // 3 :]]))
    return [SourceSection(files=f"{tmp_path}/a.jsonl", weight=3), SourceSection(files=f"{tmp_path}/b.jsonl", weight=1)]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records were alive, each time that one was decoded."""
    alive: weakref.WeakValueDictionary[int, Tracked] = weakref.WeakValueDictionary()
    counts: list[int] = []
    decode = JsonLines.decode

    def track(reader: JsonLines, unit: Any) -> Tracked:
        record = Tracked(decode(reader, unit))
        alive[id(record)] = record
        counts.append(len(alive))
        return record

    monkeypatch.setattr(JsonLines, "decode", track)
    monkeypatch.setattr(encode, "CHUNK_RECORDS", 8)
    return counts


def load(
    sources: list[SourceSection], folder: Path, batching: str = "padded", task_type: type[Numbers] = Numbers
) -> tuple[Numbers, RunConfig, Split]:
    data = DataSection(train=sources, on_bad_record="skip", workers=0, sequence_length=16, batching=batching)
    config = RunConfig(data=data, train=TrainSection(steps=1), run=RunSection(dir=str(folder / "runs")), device="cpu")
    task = task_type(config)
    world = Distributed(RankInfo.from_environment(), torch.device("cpu"), timeout=60)
    return task, config, load_split(task, "train", config, world, make_console(False))


def test_few_records_are_in_memory_while_all_are_encoded(
    sources: list[SourceSection], tmp_path: Path, decoded: list[int]
) -> None:
    _, _, split = load(sources, tmp_path)
    assert len(split.samples) == RECORDS
    assert max(decoded) < 20


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_a_warm_start_opens_no_file_of_the_data(
    sources: list[SourceSection],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    batching: str,
) -> None:
    """Neither for its digest, nor for the messages of bad records, nor for the source of each, by which weights go."""
    monkeypatch.setattr(cache, "MIN_AGE_NS", -1)  # files may be hashed as soon as they are written
    monkeypatch.setattr(train_data, "CACHED_FROM", 1, raising=False)  # samples: as if these were many
    task, config, split = load(sources, tmp_path, batching)
    order_and_rows(task, split, config)
    monkeypatch.setattr(packing, "plan_rows", lambda *_: pytest.fail("planned again"))
    opened = []
    open_path = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *rest, **more: opened.append(path) or open_path(path, *rest, **more))
    logger.addHandler(caplog.handler)
    try:
        task, config, split = load(sources, tmp_path, batching)
        sampler, rows = order_and_rows(task, split, config)
    finally:
        logger.removeHandler(caplog.handler)
    assert [path for path in opened if path.suffix == ".jsonl"] == []
    assert f"1 bad record left out:\n  {tmp_path}/b.jsonl:1: the line is not valid JSON" in caplog.text
    drawn = sampler.rows(0, np.arange(sampler.size))
    first = [rows.join(rows.read(int(row)))["input_ids"][0] for row in drawn]
    assert np.mean(np.array(first) < RECORDS // 3) == pytest.approx(0.75, abs=0.01)


class Meddling(Numbers):
    """Somebody changes the file while it is encoded."""

    meddle = staticmethod(lambda: None)

    def encode(self, record: dict[str, Any], train: bool) -> Any:
        self.meddle()
        return super().encode(record, train)


def test_data_that_change_while_they_are_encoded_are_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of one file would be found again under the digest of another."""
    path, other = tmp_path / "a.jsonl", tmp_path / "other.jsonl"
    path.write_text('{"n": 1}\n' * 9)
    other.write_text('{"n": 2}\n' * 9)
    sources = [SourceSection(files=str(path))]
    monkeypatch.setattr(Meddling, "meddle", staticmethod(lambda: other.exists() and other.replace(path)))
    with pytest.raises(UserError, match=r"a\.jsonl has changed since it was first read"):
        load(sources, tmp_path, task_type=Meddling)
    assert not [entry for entry in (tmp_path / "runs" / ".cache").iterdir() if entry.is_dir()]
    monkeypatch.setattr(Meddling, "meddle", staticmethod(path.touch))  # the same bytes: no reason to stop
    _, _, split = load(sources, tmp_path, task_type=Meddling)
    assert split.samples[0]["input_ids"].tolist() == [2, 2, 2]


class Spread(Task):
    def encode(self, record: dict[str, Any], train: bool) -> Any:
        return {"input_ids": [1], **record}


@pytest.mark.parametrize(
    ("task", "says"),
    [(Numbers, "train: columns that the task does not read: label, weight"), (Spread, None), (Task, None)],
)
def test_columns_that_a_task_does_not_read_are_named(
    task: type[Task], says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    records = [{"n": 1, "label": 2}, {"n": "no number"}, {"n": 2, "weight": 0.5}]
    with caplog.at_level("INFO"):
        train_data.log_unread_columns(task(RunConfig()), records)
    assert [record.message for record in caplog.records] == ([says] if says else [])
