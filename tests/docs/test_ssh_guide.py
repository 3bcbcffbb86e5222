"""docs/launch_ssh.md: its commands run, on the hosts that it names, and print what it shows."""

import json
import shlex
from pathlib import Path

import pytest
from made_up import write_data
from pages import blocks, write_files

import drawbar
from drawbar.config.io.load_config import load_config
from harness import run_cli
from sshd import Sshd

PAGE = Path(__file__).parents[2] / "docs" / "launch_ssh.md"


@pytest.mark.exhaustive
def test_every_command_runs(sshd: Sshd, tmp_path: Path) -> None:
    write_data(tmp_path)
    write_files(PAGE, tmp_path)
    environment = json.dumps({"PYTHONPATH": str(Path(drawbar.__file__).parents[1]), "OMP_NUM_THREADS": "1"})
    config = tmp_path / "config.yaml"
    config.write_text(f"{config.read_text()}cluster: {{ssh_config: {sshd.config}, environment: {environment}}}\n")
    printed = ""
    for block in blocks(PAGE):
        if block.language == "bash" and not block.mark:
            done = run_cli(*shlex.split(block.text)[1:], cwd=tmp_path)
            assert done.code == 0, done.err
            printed = done.out
        elif block.mark == "output":
            for line in block.text.splitlines():
                assert line in printed
        elif block.mark == "part":
            (tmp_path / "part.yaml").write_text(block.text)
            assert load_config(tmp_path / "part.yaml").config.cluster
        elif block.text.startswith("# hosts"):
            (tmp_path / "hosts").write_text(block.text)
    assert "30 steps made" in printed
