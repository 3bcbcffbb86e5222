"""How the threads of torch's CPU kernels wait for one another."""

import os
import subprocess
import sys
import time

import pytest

from drawbar.threads import SLEEP_SOON, CoreWait, let_threads_sleep

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_threads_sleep_soon() -> None:
    environ: dict[str, str] = {"HOME": "/"}
    let_threads_sleep(environ)
    assert environ == {"HOME": "/", **SLEEP_SOON}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_users_own_setting_stays(name: str) -> None:
    environ = {name: "active"}
    let_threads_sleep(environ)
    assert environ == {name: "active"}


def run(program: str) -> str:
    """What a new interpreter prints, without the settings that these tests run under."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    ).stdout


def test_they_are_told_before_torch_is_loaded() -> None:
    assert (
        run("import drawbar, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)")
        == "passive False\n"
    )


@pytest.mark.exhaustive
def test_a_script_that_has_loaded_torch_gets_one_more_pool() -> None:
    program = "import torch, threading, {}; print(*(thread.name for thread in threading.enumerate()))"
    assert run(program.format("drawbar")) == "MainThread drawbar-sleep-at-once\n"
    assert run("import drawbar; " + program.format("os")) == "MainThread\n"


@LINUX
def test_a_thread_without_a_core_of_its_own_waits() -> None:
    core = min(os.sched_getaffinity(0))
    program = (
        f"import os, time; os.sched_setaffinity(0, [{core}]); from drawbar.threads import CoreWait; wait = CoreWait()\n"
        "end = time.monotonic() + 1\n"
        "while time.monotonic() < end: pass\n"
        "print(wait.share())"
    )
    rivals = [
        subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"])
        for _ in range(3)
    ]
    try:
        assert 0.3 < float(run(program)) <= 1
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()


@LINUX
def test_a_thread_that_sleeps_does_not_wait_for_a_core() -> None:
    wait = CoreWait()
    time.sleep(0.5)
    assert 0 <= wait.share() < 0.5
