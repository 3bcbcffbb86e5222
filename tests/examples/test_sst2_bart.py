"""Workflow 2: a YAML file drives everything, on one process, two, and two nodes."""

import json
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from walkthrough import commands, copy_example, walk, write_sentiments

from harness import Finished, free_port, run_torchrun
from runs import losses

pytestmark = pytest.mark.exhaustive

SMALLER = {
    **{f"task.from_scratch.{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"task.from_scratch.{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
    "task.from_scratch.d_model": 32,
    "task.tokenizer.vocab_size": 300,
    "train.global_batch": 16,
    "train.epochs": 2,
    "eval.every": 5,
    "checkpoint.every": 10,
    "tracking.log_every": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sentiments(tmp_path)
    copy_example("sst2_bart", tmp_path, config=SMALLER)
    return tmp_path


def test_the_walkthrough(folder: Path) -> None:
    walk("sst2_bart", folder, env={"SST2": str(folder)})

    run = folder / "runs" / "sst2"
    saved = {path.name for path in (run / "checkpoints").iterdir() if path.is_dir()}
    assert {"step-00000010", "step-00000020"} <= saved, "a checkpoint for each epoch"
    assert (run / "checkpoints" / "best.json").exists()
    assert list((run / "tensorboard").iterdir())
    for split in ("validation", "test"):
        found = json.loads((run / "eval" / split / "scores.json").read_text())
        assert {"step", "loss", "accuracy", "f1_macro"} <= found.keys()
        assert len((run / "eval" / split / "predictions.jsonl").read_text().splitlines()) == 24
    pair = folder / "runs" / "sst2-pair"
    assert sorted(path.name for path in (pair / "logs").iterdir()) == ["rank-0000.log", "rank-0001.log"]
    assert losses(pair).keys() == losses(run).keys()
    assert (folder / "sst2-model" / "model.safetensors").exists()


def test_two_nodes_meet_at_an_address_and_port(folder: Path) -> None:
    """The README's two commands for two nodes, with this machine as both of them and a process on each."""
    shown = commands("sst2_bart", language="console")
    nodes = [command for command in shown if command.startswith("torchrun")]
    assert len(nodes) == 2
    port = free_port()
    settings = ["train.steps=3", "train.epochs=null", "precision=fp32", "task.from_scratch.dropout=0.0"]

    def run_node(command: str) -> Finished:
        here = re.sub(r"--master_addr=\S+", "--master_addr=127.0.0.1", command)
        here = re.sub(r"--master_port=\S+", f"--master_port={port}", here).replace("per_node=4", "per_node=1")
        return run_torchrun(*shlex.split(here)[1:], *settings, cwd=folder, env={"SST2": str(folder)})

    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(run_node, nodes))
    for done in ended:
        assert done.code == 0, done.out + done.err
    run = folder / "runs" / "sst2-nodes"
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-0000.log", "rank-0001.log"]
    assert len(losses(run)) == 3
