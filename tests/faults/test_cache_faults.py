"""Acceptance: several processes start on a cold cache; the one that encodes is killed, stopped, or fails."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from drawbar.data import cache
from drawbar.data.cache import content_key, encode_cached
from drawbar.data.dataset import EncodedDataset
from drawbar.data.sources import read_list
from drawbar.errors import ExitCode, UserError

RECORDS = [{"n": n} for n in range(60)]
MADE_OF = {"the records": "20 numbers"}
KEY = content_key(MADE_OF)
PATIENCE = 150
"""Seconds for processes that start anew, on a machine that does much else."""


@dataclass
class Encoder:
    """Notes every call in a file, with the process that made it."""

    calls: Path
    seconds: float = 0.01
    bad: int = -1

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        with self.calls.open("a") as file:
            file.write(f"{record['n']} {os.getpid()}\n")
        time.sleep(self.seconds)
        if record["n"] == self.bad:
            raise ValueError("a bad record")
        return {"input_ids": list(range(1 + record["n"] % 5)), "name": str(record["n"])}


def cached(
    folder: Path, encoder: Encoder, *, eager: bool = True, workers: int = 0, timeout: float = 60
) -> EncodedDataset:
    return encode_cached(
        lambda: read_list(RECORDS, lambda i: f"file:{i + 1}"),
        encoder,
        inputs=MADE_OF,
        cache=folder / "cache",
        workers=workers,
        name="train",
        on_bad_record="error",
        progress=None,
        timeout=timeout,
        eager=eager,
    )


def run(folder: Path, number: int, encoder: Encoder, eager: bool, workers: int, count: int) -> None:
    (folder / f"started-{number}").touch()  # on a busy machine one might come when the others have ended
    wait_until(lambda: len(list(folder.glob("started-*"))) >= count)
    cache.HEAD_START_SECONDS = PATIENCE  # processes may start seconds apart on a busy machine
    try:
        dataset = cached(folder, encoder, eager=eager, workers=workers)
        items = [[dataset[i]["input_ids"].tolist(), dataset[i]["name"]] for i in range(len(dataset))]
        result = {"fingerprint": dataset.fingerprint, "items": items}
    except UserError as error:
        result = {"what": error.what, "where": error.where}
    (folder / f"result-{number}").write_text(json.dumps(result))


def start(
    folder: Path, count: int, encoder: Encoder, *, eager: Callable[[int], bool] = lambda number: True, workers: int = 0
) -> list[SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run, args=(folder, number, encoder, eager(number), workers, count))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    return processes


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s in vain"
        time.sleep(0.01)


def finish(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.join(PATIENCE)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive


def calls(encoder: Encoder) -> list[str]:
    return encoder.calls.read_text().splitlines() if encoder.calls.exists() else []


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result-*"))]


def check_cache(folder: Path) -> None:
    """Nothing is left but the entry and its lock."""
    entry = f"train-{KEY[:24]}"
    assert sorted(path.name for path in (folder / "cache").iterdir()) == [entry, f"{entry}.lock"]


def expected_items() -> list[Any]:
    return [[list(range(1 + n % 5)), str(n)] for n in range(60)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [0, 1])
def test_three_processes_encode_once(tmp_path: Path, workers: int) -> None:
    encoder = Encoder(tmp_path / "calls")
    processes = start(tmp_path, 3, encoder, eager=lambda number: workers == 1 or number == 1, workers=workers)
    finish(processes)
    assert sorted(int(line.split()[0]) for line in calls(encoder)) == list(range(60))
    encoded_by = {int(line.split()[1]) for line in calls(encoder)}
    assert len(encoded_by) == 1
    assert workers == 1 or encoded_by == {processes[1].pid}  # the eager one
    found = results(tmp_path)
    assert [result.get("items") for result in found] == [expected_items()] * 3
    assert len({result["fingerprint"] for result in found}) == 1
    check_cache(tmp_path)


@pytest.mark.exhaustive
def test_one_takes_over_from_a_killed_process(tmp_path: Path) -> None:
    encoder = Encoder(tmp_path / "calls")
    processes = start(tmp_path, 3, encoder)
    wait_until(lambda: len(calls(encoder)) >= 20)
    killed = int(calls(encoder)[0].split()[1])
    os.kill(killed, signal.SIGKILL)
    finish(processes)
    found = results(tmp_path)
    assert [result.get("items") for result in found] == [expected_items()] * 2
    by_process = [line.split()[1] for line in calls(encoder)]
    assert len(set(by_process)) == 2
    assert len(calls(encoder)) - by_process.count(str(killed)) == 60
    check_cache(tmp_path)


@pytest.mark.exhaustive
def test_workers_end_with_a_killed_process(tmp_path: Path) -> None:
    encoder = Encoder(tmp_path / "calls", seconds=1)  # the second worker finds something left, however late it starts
    processes = start(tmp_path, 1, encoder, workers=2)
    wait_until(lambda: len({line.split()[1] for line in calls(encoder)}) == 2)
    workers = {int(line.split()[1]) for line in calls(encoder)}
    assert processes[0].pid not in workers
    processes[0].kill()
    wait_until(lambda: not any(alive(pid) for pid in workers))
    finish(processes)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.exhaustive
def test_waiting_for_a_stopped_process_ends(tmp_path: Path) -> None:
    encoder = Encoder(tmp_path / "calls")
    processes = start(tmp_path, 1, encoder)
    wait_until(lambda: bool(calls(encoder)))
    pid = processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=rf"process {pid} on host .* sent no heartbeat for 1 s") as caught:
            cached(tmp_path, encoder, timeout=1)
        assert f"kill -9 {pid}" in str(caught.value.remedy)
        assert caught.value.exit_code == ExitCode.FAILED
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(cached(tmp_path, encoder)) == 60
    finish(processes)
    assert len(calls(encoder)) == 60


@pytest.mark.exhaustive
def test_a_bad_record_fails_all_at_once(tmp_path: Path) -> None:
    encoder = Encoder(tmp_path / "calls", bad=55)
    processes = start(tmp_path, 3, encoder)
    finish(processes)
    found = results(tmp_path)
    assert [result["where"] for result in found] == ["file:56"] * 3
    assert len({result["what"] for result in found}) == 1
    assert len(calls(encoder)) == 56
    mended = Encoder(tmp_path / "calls", seconds=0)
    assert len(cached(tmp_path, mended)) == 60
    check_cache(tmp_path)


SMALL_DISK = """
import json, sys
from pathlib import Path
import numpy as np
from drawbar.data.cache import encode_cached
from drawbar.data.dataset import EncodedDataset
from drawbar.data.sources import read_list
from drawbar.errors import UserError

cache = Path(sys.argv[1]) / "cache"
def cached(records):
    return encode_cached(
        lambda: read_list(records, str), lambda record: {"x": np.full(500, 2**40 + record)}, inputs={"a": "b"},
        cache=cache, workers=0, name="train", on_bad_record="error", progress=None, timeout=60, eager=True)
try:
    cached(range(1024))
except UserError as error:
    left = sorted(path.name for path in cache.iterdir())
    print(json.dumps([error.what, error.where, error.remedy, int(error.exit_code), left, len(cached(range(100)))]))
"""


@pytest.mark.exhaustive
def test_a_full_disk(tmp_path: Path) -> None:
    """4 MB of samples for a disk of 3 MB, in a mount name space of its own."""
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=3m tmpfs "$1"'
    if shutil.which("unshare") is None or subprocess.run([*inside, mount, "sh", str(tmp_path)], check=False).returncode:
        pytest.skip("no user name spaces here, so no small file system can be mounted")
    command = [*inside, f'{mount} && exec "$2" -c "$3" "$1"', "sh", str(tmp_path), sys.executable, SMALL_DISK]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    what, where, remedy, code, left, then = json.loads(output)
    assert "cannot write the encoded data: No space left on device" in what
    needed = re.search(r"about (\d+\.\d) MiB needed, (\d+\.\d) MiB free", what)
    assert needed is not None
    assert 3.9 < float(needed[1]) < 8
    assert 2.5 < float(needed[2]) <= 3  # what there is once the draft is gone
    assert where == str(tmp_path / "cache")
    assert "another disk (data.cache)" in remedy
    assert code == ExitCode.FAILED
    assert left == [f"train-{content_key({'a': 'b'})[:24]}{ending}" for ending in (".error", ".lock")]
    assert then == 100
