"""The node check: each process here is the launcher of one."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.distributed.watchdog import NODE
from drawbar.errors import UserError
from drawbar.launch import node_check
from drawbar.launch.findings import CLOCK_SECONDS, bad_nodes
from drawbar.launch.node_check import NodeCheck
from drawbar.launch.rendezvous import Rendezvous
from harness import free_port, run_ranks, wait_until

CASES = (
    "all there",
    "n3 absent",
    "n1 absent",
    "another config",
    "another torch",
    "another clock",
    "n1 late",
    "n3 lost",
    "n3 left",
    "n1 lost",
)
NAMES = ("n1", "n2", "n3")
_watches: list[node_check.NodeWatch] = []
"""A node's store lives as long as its process, where there is one case alone."""


def take_part(folder: str) -> dict[str, dict[str, Any]]:
    """What one of three nodes gets to know in each case."""
    node = int(os.environ["RANK"])
    node_check._BEAT = 0.3
    return {case: _case(case, node, _port(node, Path(folder) / case), Path(folder) / case) for case in CASES}


def _port(node: int, run_dir: Path) -> int:
    """A port that is free when the case begins: another test may take one that was looked for earlier."""
    file = run_dir / "port"
    if node == 0:
        run_dir.mkdir()
        file.with_suffix(".new").write_text(str(free_port()))
        file.with_suffix(".new").rename(file)
    wait_until(file.exists, "the port", 120)
    return int(file.read_text())


def _case(case: str, node: int, port: int, run_dir: Path) -> dict[str, Any]:
    rendezvous = Rendezvous(f"drawbar-{port}", f"127.0.0.1:{port}", len(NAMES), node, "127.0.0.1", NAMES)
    absent = case.endswith("absent") and case.startswith(NAMES[node])
    odd = case.startswith("another") and node == 1
    config = "other" if odd and case == "another config" else "same"
    said, told = StringIO(), StringIO()
    real_version, real_time = torch.__version__, time.time
    if odd and case == "another torch":
        torch.__version__ = "1.13.1"  # type: ignore[assignment]
    if odd and case == "another clock":
        node_check.time.time = lambda: real_time() + 30  # type: ignore[attr-defined]
    if case == "n1 late" and node == 0:
        time.sleep(CLOCK_SECONDS + 2)  # the others wait for it, which says nothing of their clocks
    error, code, seconds = "", 0, 0.0
    with redirect_stdout(said), redirect_stderr(told):
        try:
            if not absent:
                begin = time.monotonic()
                call = NodeCheck(config, "cpu", run_dir, seconds=3 if "absent" in case else 60)
                watch = call.run(rendezvous)
                _watches.append(watch)
                _train(case, node, watch)
        except UserError as caught:
            error, code, seconds = str(caught), int(caught.exit_code), time.monotonic() - begin
        finally:
            torch.__version__ = real_version
            node_check.time.time = real_time  # type: ignore[attr-defined]
    return {"error": error, "code": code, "seconds": seconds, "out": said.getvalue(), "err": told.getvalue(),
            "bad": bad_nodes(run_dir, rendezvous.launch_id), "node": os.environ.get(NODE)}  # fmt: skip


def _train(case: str, node: int, watch: node_check.NodeWatch) -> None:
    """As long as the others look who is lost."""
    if case.endswith("lost") and case.startswith(NAMES[node]):
        time.sleep(1)
        return
    with watch:
        if case == "n3 left" and node == 2:
            return
        if case == "n3 lost" and node == 1:  # it is told by the first one, and ends
            ended = threading.Event()
            node_check.os._exit = lambda code: ended.set() or sys.exit()  # type: ignore[assignment]
            assert ended.wait(60)
            return
        if case.endswith(("lost", "left")):
            watch._report_silent_nodes()


@pytest.mark.exhaustive
def test_the_nodes_look_at_one_another(tmp_path: Path) -> None:
    found = run_ranks(take_part, len(NAMES), str(tmp_path), timeout=240)

    for node, answers in enumerate(found):
        answer = answers["all there"]
        assert (answer["error"], answer["err"], answer["bad"], answer["node"]) == ("", "", {}, NAMES[node])
    assert found[0]["all there"]["out"] == "drawbar: the 3 nodes have answered: n1, n2, n3\n"

    for node in (0, 1):
        answer = found[node]["n3 absent"]
        assert answer["code"] == 1
        assert (
            "n1 reports that the nodes cannot train together:\nnode n3 did not answer within 3 s\n" in answer["error"]
        )
        assert "fix:" in answer["error"]
        assert answer["bad"] == {"n3": "node n3 did not answer within 3 s"}

    for node in (1, 2):
        answer = found[node]["n1 absent"]
        assert answer["code"] == 1
        assert answer["error"].startswith(f"node {NAMES[node]}: the first node, n1, did not answer within 3 s")
    assert found[2]["n1 absent"]["bad"] == {"n1": "node n1 did not answer within 3 s"}

    for answers in found:
        assert "the configuration on n2 differs from" in answers["another config"]["error"]
        versions = f"torch is not the same on all nodes: {torch.__version__} on n1, n3; 1.13.1 on n2"
        assert versions in answers["another torch"]["error"]
        assert answers["another torch"]["code"] == answers["another config"]["code"] == 1
        assert answers["another clock"]["error"] == ""
    warning = found[0]["another clock"]["err"]
    assert warning.startswith("warning: the clock of n2 is ")
    assert warning.endswith(" s ahead of that of n1\n")
    assert [answers["n1 late"]["err"] for answers in found] == ["", "", ""]

    for case, node, lost in (("n3 lost", 0, "n3"), ("n1 lost", 1, "n1"), ("n1 lost", 2, "n1")):
        assert f"error: node {lost} is lost: it has sent no heartbeat for" in found[node][case]["err"]
        assert list(found[node][case]["bad"]) == [lost]
    assert "error: node n3 is lost: it has sent no heartbeat for" in found[1]["n3 lost"]["err"]
    for node in (0, 1):
        assert (found[node]["n3 left"]["err"], found[node]["n3 left"]["bad"]) == ("", {})


def test_a_node_that_comes_late_blames_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node has given it up, and is gone."""
    node_check.record_bad_nodes(tmp_path, "drawbar-7", {"n2": "node n2 did not answer within 60 s"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rendezvous = Rendezvous("drawbar-7", f"127.0.0.1:{port}", 2, 1, "127.0.0.1", ("n1", "n2"))
    monkeypatch.setenv(NODE, "n2")
    with pytest.raises(UserError, match="the first node, n1, did not answer"):
        NodeCheck("same", "cpu", tmp_path, seconds=0.2).run(rendezvous)
    assert list(bad_nodes(tmp_path, "drawbar-7")) == ["n2"]


@pytest.mark.exhaustive
def test_a_stranger_at_the_port_is_no_hang(tmp_path: Path) -> None:
    """It accepts, and never answers; as the process ends itself then, it is one of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = (
            "from pathlib import Path; from drawbar.launch.rendezvous import Rendezvous\n"
            "from drawbar.launch import node_check\n"
            "node_check._CONNECT_SECONDS = 1\n"
            f"rendezvous = Rendezvous('drawbar-7', '127.0.0.1:{port}', 2, 1, '127.0.0.1', ('n1', 'n2'))\n"
            f"node_check.NodeCheck('same', 'cpu', Path({str(tmp_path)!r}), seconds=1).run(rendezvous)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "the first node, n1, did not answer within 1 s" in done.stderr
    assert json.loads((tmp_path / "launch" / "bad-nodes.json").read_text())[0]["nodes"].keys() == {"n1"}
