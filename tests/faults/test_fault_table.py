"""Some cases of the table of faults; ``make faults`` runs all of them."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_table import TIMEOUT, Case, command, end_of, make_fated_project, wrong_with_directory, wrong_with_resumed

from drawbar.distributed.watchdog import NODE
from drawbar.launch.rendezvous import Rendezvous
from exhaustive import params
from harness import Finished, free_port, run_cli, start_cli, wait_until

OFTEN = [Case("stop", "backward", "ddp", 1), Case("crash", "callback", "ddp", 0)]
SOMETIMES = [
    Case("spin", "callback", "ddp", 1),
    Case("hold", "forward", "ddp", 0),
    Case("exit", "optimizer", "ddp", 1),
    Case("interrupt", "save", "ddp", 1),
    Case("kill", "evaluation", "ddp", 0),
    Case("stop", "forward", "fsdp", 1),
    Case("crash", "optimizer", "tensor", 1),
    Case("raise", "evaluation", "fsdp", 1),
    Case("raise", "backward", "pipeline", 1),
]


@pytest.mark.parametrize("case", params([*OFTEN, *SOMETIMES], OFTEN), ids=str)
def test_a_rank_meets_its_fate(case: Case, tmp_path: Path) -> None:
    ending = end_of(case, tmp_path)
    assert not ending.problems, ending.message
    if case == OFTEN[0]:  # the other rank waits long enough to tell for what
        autopsy = (tmp_path / "runs" / "tiny" / "autopsy.md").read_text()
        assert re.search(r"\| 0 \| .* default_pg 0: \d+, gloo:all_reduce \[", autopsy)
        assert re.search(r"Collective \d+ of the group default_pg 0 was not begun by rank 1", autopsy)


@pytest.mark.parametrize(
    ("fault", "times", "code"),
    params([("kill", 2, 0), ("stop", 1, 0), ("crash", 3, 1), ("exit", 1, 0)], [("kill", 2, 0)]),
)
def test_a_launcher_starts_lost_ranks_again(fault: str, times: int, code: int, tmp_path: Path) -> None:
    project = make_fated_project(tmp_path)
    fate = {"FAULT": fault, "PHASE": "backward", "WHO": "1", "TIMES": str(times)}
    done = run_cli(*command("ddp"), "launch.restarts=2", "--resume", "never", cwd=project, env=fate)
    assert done.code == code, done.err
    assert done.err.count("starting the ranks again") == min(times, 2)
    assert "(1 of 2)" in done.err
    if code == 0:
        assert not list(wrong_with_resumed(Case(fault, "backward", "ddp", 1), project / "runs" / "tiny"))


@pytest.mark.parametrize("phase", params(["forward", "backward", "optimizer"], ["backward"]))
def test_a_launcher_does_not_repeat_an_error_of_the_users(phase: str, tmp_path: Path) -> None:
    project = make_fated_project(tmp_path)
    fate = {"FAULT": "raise", "PHASE": phase, "WHO": "1"}
    done = run_cli(*command("ddp"), "launch.restarts=2", cwd=project, env=fate)
    assert done.code == 1
    assert "starting the ranks again" not in done.err


def test_one_signal_ends_a_run_with_a_stopped_rank(tmp_path: Path) -> None:
    project = make_fated_project(tmp_path)
    fate = {"FAULT": "stop", "PHASE": "forward", "WHO": "1"}
    process = start_cli(*command("ddp"), cwd=project, output=tmp_path, env=fate)
    wait_until((project / "fate").exists, "the fault")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(TIMEOUT + 20)
    said = (tmp_path / "0.err").read_text()
    assert process.exitcode in (1, 75), said
    assert "error: rank 1 (step 3, forward) was stopped" in said
    assert not list(wrong_with_directory(project))


@pytest.mark.parametrize("fault", params(["crash", "spin", "stop"], ["crash"]))
def test_the_rank_of_another_node_is_named(fault: str, tmp_path: Path) -> None:
    project, names, endpoint = make_fated_project(tmp_path), ("node-a", "node-b"), f"127.0.0.1:{free_port()}"
    settings = [*command("ddp"), "launch.nproc=1"]

    def run_node(node: int) -> Finished:
        env = {"FAULT": fault, "PHASE": "forward", "WHO": "1", NODE: names[node]}
        Rendezvous("drawbar-7", endpoint, len(names), node, "127.0.0.1", names).to_environment(env)
        return run_cli(*settings, cwd=project, env=env)

    with ThreadPoolExecutor(len(names)) as pool:
        for done in pool.map(run_node, range(len(names))):
            assert done.code == 1
            assert re.search(r"error: rank 1 on node-[ab] \(step 3, forward\) ", done.err)
            assert "fated.py, line " in done.err
    assert "error: rank 1 on node-" in (project / "runs" / "tiny" / "autopsy.md").read_text()
