"""Encoding in other processes. The functions that encode are at the top of the module: workers import it."""

import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drawbar.data import encode
from drawbar.data.columns import MemoryStorage
from drawbar.data.dataset import EncodedDataset, encode_records, read_samples, write_samples
from drawbar.data.encode import WorkerPool
from drawbar.data.sources import read_list
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger
from exhaustive import some

RECORDS = [{"n": n} for n in range(500)]


def several_kinds(record: dict[str, Any]) -> Any:
    n = record["n"]
    if n % 7 == 0:
        return None
    sample = {"input_ids": list(range(1 + n % 5)), "name": f"é{n}", "score": n / 2, "truncated": n % 3 == 0}
    return [sample] * (n % 3) or [{**sample, "score": 1}]


def about_the_process(record: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.001)
    return {
        "pid": os.getpid(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "tokenizers": os.environ.get("TOKENIZERS_PARALLELISM", ""),
        "ignores_interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    }


@dataclass
class Together:
    """Goes on when two processes are here, or one alone might take all the records."""

    folder: Path

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        (self.folder / str(os.getpid())).touch()
        end = time.monotonic() + 30
        while len(os.listdir(self.folder)) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return about_the_process(record)


def slow(record: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.25)
    return {"n": record["n"]}


def bad_from_100_on(record: dict[str, Any]) -> dict[str, Any]:
    if record["n"] == 130:
        raise UserError("label out of range", where="labels.txt:7", remedy="mend it")
    return {"x": 1 // max(0, 100 - record["n"])}


def killed_at_40(record: dict[str, Any]) -> dict[str, Any]:
    if record["n"] == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return record


def stuck_at_40(record: dict[str, Any]) -> dict[str, Any]:
    if record["n"] == 40:
        signal.pause()
    return record


def encoded(
    encoder: Any, workers: Any = 2, *, timeout: float = 60, on_bad_record: str = "error", **options: Any
) -> EncodedDataset:
    storage = MemoryStorage()
    about = write_samples(
        storage,
        read_list(RECORDS, lambda i: f"file:{i + 1}"),
        encoder,
        progress=options.get("progress"),
        on_bad_record=on_bad_record,
        workers=workers,
        timeout=timeout,
    )
    assert multiprocessing.active_children() == []
    return read_samples(storage, about)


def pids(dataset: EncodedDataset) -> set[int]:
    return {dataset[i]["pid"] for i in range(len(dataset))}


def test_workers_give_what_one_process_gives() -> None:
    calls: list[tuple[int, int]] = []
    one = encode_records(RECORDS, several_kinds, describe=str)
    two = encoded(several_kinds, progress=lambda done, total: calls.append((done, total)))
    assert two.fingerprint == one.fingerprint
    assert two.record_of.tolist() == one.record_of.tolist()
    assert (two.dropped, two.truncated) == (one.dropped, one.truncated)
    assert [two[i]["name"] for i in range(len(two))] == [one[i]["name"] for i in range(len(one))]
    assert two.dropped == 72
    assert calls == sorted(calls)
    assert calls[-1] == (500, 500)


def test_workers_have_one_thread_and_leave_interrupts_to_their_parent(tmp_path: Path) -> None:
    dataset = encoded(Together(tmp_path))
    assert len(pids(dataset)) == 2
    assert os.getpid() not in pids(dataset)
    item = dataset[0]
    assert (item["threads"], item["tokenizers"], item["ignores_interrupt"]) == ("1", "false", True)


def test_auto_starts_no_workers_for_a_little_work() -> None:
    assert pids(encoded(about_the_process, "auto")) == {os.getpid()}


@pytest.mark.exhaustive
def test_auto_starts_workers_for_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "TRIAL_SECONDS", 0.05)
    monkeypatch.setattr(encode, "CHUNK_SECONDS", 0.02)
    monkeypatch.setattr(encode, "MIN_WORK_SECONDS", 0.05)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    dataset = encoded(about_the_process, "auto")
    assert dataset[0]["pid"] == os.getpid()
    assert dataset[len(dataset) - 1]["pid"] != os.getpid()
    assert dataset.record_of.tolist() == list(range(500))


@pytest.mark.exhaustive
def test_the_first_bad_record_is_named() -> None:
    with pytest.raises(UserError) as caught:
        encoded(bad_from_100_on)
    assert caught.value.where == "file:101"
    assert "encode failed on a record: ZeroDivisionError" in caught.value.what
    assert caught.value.remedy


@pytest.mark.exhaustive
def test_bad_records_are_skipped_in_workers_too() -> None:
    dataset = encoded(bad_from_100_on, on_bad_record="skip")
    one = encode_records(RECORDS, bad_from_100_on, describe=lambda i: f"file:{i + 1}", on_bad_record="skip")
    assert len(dataset) == 100
    assert dataset.skipped_count == 400
    assert dataset.skipped == one.skipped
    assert dataset.skipped[30] == "labels.txt:7: label out of range"


def test_a_user_error_survives_pickling() -> None:
    error = UserError("what", where="where", remedy="remedy", exit_code=ExitCode.FAILED)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.exit_code == ExitCode.FAILED


@pytest.mark.exhaustive
def test_slow_records_are_no_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows at first how long a record takes: a worker's deadline is one for few of them."""
    monkeypatch.setattr(encode, "ProcessPoolExecutor", lambda count, *_, **__: ThreadPoolExecutor(count))
    monkeypatch.setattr(encode, "_function", encode._ChunkEncoder(slow, skip=False), raising=False)
    chunks = encode.encode_chunks(read_list(RECORDS[:8], str), slow, skip=False, workers=1, timeout=1)
    assert sum(chunk.records for chunk in chunks) == 8


@pytest.mark.parametrize(
    ("encoder", "timeout", "what"), some([(killed_at_40, 60, "was killed"), (stuck_at_40, 2, "no result for 2 s")], 1)
)
def test_a_lost_worker_is_an_error(encoder: Any, timeout: float, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        encoded(encoder, timeout=timeout)
    assert caught.value.exit_code == ExitCode.FAILED
    assert caught.value.where == "data.workers"
    assert "use fewer processes (data.workers=1)" in str(caught.value.remedy)  # there were two
    assert multiprocessing.active_children() == []


def test_one_worker_cannot_be_fewer() -> None:
    pool = WorkerPool(b"", 1, timeout=60, activity="encoding records")
    assert "fewer" not in str(pool._lost_worker(TimeoutError()).remedy)


@pytest.mark.exhaustive
def test_a_process_that_is_ended_leaves_no_words_of_pythons_own(tmp_path: Path) -> None:
    program = """
import os
from drawbar.data.encode import encode_chunks
from drawbar.data.sources import read_list
def encode(record):
    return record
if __name__ == "__main__":
    chunks = encode_chunks(read_list([{"n": 1}] * 500, str), encode, skip=False, workers=1, timeout=60)
    next(chunks)
    os.write(1, os.environ["PYTHONWARNINGS"].encode())
    os._exit(75)  # as after a signal
"""
    (tmp_path / "program.py").write_text(program)
    own = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, env=own)
    assert (done.returncode, done.stdout, done.stderr) == (75, "default", "")


def test_what_cannot_be_sent_is_encoded_here(caplog: pytest.LogCaptureFixture) -> None:
    logger.addHandler(caplog.handler)
    try:
        dataset = encoded(lambda record: about_the_process(record))
    finally:
        logger.removeHandler(caplog.handler)
    assert pids(dataset) == {os.getpid()}
    assert "encoding records in this process only" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_a_task_of_a_notebook_is_encoded_here(tmp_path: Path) -> None:
    program = """
import logging, os
from drawbar.data.columns import MemoryStorage
from drawbar.data.dataset import write_samples
from drawbar.data.sources import read_list
logging.basicConfig()
def encode(record):
    return {"here": os.getpid() == HERE}
HERE = os.getpid()
storage = MemoryStorage()
write_samples(storage, read_list([{}] * 40, str), encode, progress=None, on_bad_record="error", workers=2)
print(storage.array("00.values.bin", bool).all())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "True\n"
    assert "notebook" in done.stderr
