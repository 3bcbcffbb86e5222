"""From a configuration to the parts of a run."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import drawbar
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.dataset import encode_records
from drawbar.data.loader import MicroBatchSize
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tracking.console import make_console
from drawbar.train.batches import describe_samples, eval_micro_batch, load_split, train_micro_batch
from drawbar.train.setup import build_task
from harness import run_ranks
from runs import Fit


def world() -> Distributed:
    return Distributed(RankInfo.from_environment(), torch.device("cpu"), timeout=60)


def load_odd_split(folder: str) -> str:
    own = Path(folder) / os.environ.get("RANK", "alone")  # as where each host has its own disk
    own.mkdir()
    os.chdir(own)
    shutil.copy("../config.yaml", ".")
    Path("train.txt").write_text("the load\nthe driver\n" if own.name == "1" else "the load\nthe engine\n")
    config = drawbar.load_config("config.yaml").config
    with world() as joined:
        task = build_task(CausalLM, config, joined, config.run_dir)
        try:
            load_split(task, "train", config, joined, make_console(False))
        except UserError as error:
            return str(error)
    return "accepted"


@pytest.mark.exhaustive
def test_ranks_that_read_other_data_are_named(project: Path) -> None:
    assert run_ranks(load_odd_split, 1, str(project)) == ["accepted"]
    for refused in run_ranks(load_odd_split, 2, str(project)):
        assert refused.startswith("rank 1 reads other train data than rank 0")


class Made(drawbar.Task):
    """Says which process made its tokenizer and its metadata, and uses them at once."""

    def __init__(self, context: drawbar.TaskContext) -> None:
        super().__init__(context)
        self.seen = (self.tokenizer, self.dataset_metadata)

    def build_tokenizer(self) -> Any:
        return {"made by": os.getpid()}

    def find_dataset_metadata(self) -> dict[Any, Any]:
        return {1: (self.tokenizer["made by"], os.getpid())}


def build_made(folder: str) -> tuple[int, Any, Any, bool, bool]:
    with world() as joined:
        task = build_task(Made, RunConfig(), joined, Path(folder), has_checkpoint=True, has_labels=False)
    assert isinstance(task, Made)
    return os.getpid(), *task.seen, task.has_checkpoint, task.has_labels


def test_the_task_of_every_rank_has_what_rank_0_made(tmp_path: Path) -> None:
    one, other = run_ranks(build_made, 2, str(tmp_path))
    maker = one[0]
    assert other[0] != maker
    assert one[1:] == other[1:] == ({"made by": maker}, {"1": [maker, maker]}, True, False)
    (tmp_path / "task.json").write_text('{"1": "from a run"}')
    assert build_made(str(tmp_path))[2] == {"1": "from a run"}


def test_a_description_counts_what_was_made(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    Path("train.txt").write_text("the load\n\nthe engine\n" + "the hill " * 200)
    config = drawbar.load_config("config.yaml").config
    task = build_task(CausalLM, config, world(), config.run_dir)
    samples = load_split(task, "train", config, world(), make_console(False)).samples
    tokens = sum(len(samples[number]["input_ids"]) for number in range(len(samples)))
    assert describe_samples(samples) == f"{len(samples)} samples of 3 records, {tokens:,} tokens"
    assert np.array_equal(np.unique(samples.record_of), [0, 1, 2])


def test_a_description_names_what_was_left_out() -> None:
    def encode(record: dict[str, int]) -> dict[str, object] | None:
        if record["n"] == 3:
            raise ValueError("three")
        return None if record["n"] == 2 else {"x": record["n"], "truncated": record["n"] == 1}

    records = [{"n": number} for number in range(5)]
    samples = encode_records(records, encode, describe=str, on_bad_record="skip")
    assert describe_samples(samples) == "3 samples of 4 records (1 dropped, 1 truncated, 1 bad)"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("parallel.fp8=tensorwise", "fp8 needs NVIDIA GPUs"),
        ("task.cross_entropy=liger", "liger-kernel only has kernels for CUDA devices"),
        ("task.attention=flash_attention_2", "flash attention is a CUDA kernel"),
    ],
)
def test_what_the_machine_cannot_compute_is_refused_before_the_data_are_read(
    setting: str, says: str, project: Path, fit: Fit
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU computes it")
    (project / "train.txt").unlink()
    with pytest.raises(UserError, match=says):
        fit(setting, "device=auto", "precision=auto")


AUTO = "train.micro_batch=auto"


@pytest.mark.parametrize(
    ("settings", "training", "evaluation"),
    [
        ((), MicroBatchSize(rows=4), MicroBatchSize(rows=4)),
        (("train.micro_batch=2", "eval.micro_batch=7"), MicroBatchSize(rows=2), MicroBatchSize(rows=7)),
        ((AUTO,), MicroBatchSize(tokens=8192), MicroBatchSize(tokens=8192)),
        ((AUTO, "train.micro_batch_tokens=99"), MicroBatchSize(tokens=99), MicroBatchSize(tokens=99)),
    ],
)
def test_size_of_a_forward(
    settings: tuple[str, ...], training: MicroBatchSize, evaluation: MicroBatchSize, project: Path
) -> None:
    config = drawbar.load_config(project / "config.yaml", settings).config
    assert train_micro_batch(config, world(), has_tokens=True) == training
    assert eval_micro_batch(config, has_tokens=True) == evaluation


def test_size_of_a_forward_without_tokens(project: Path) -> None:
    config = drawbar.load_config(project / "config.yaml", [AUTO]).config
    assert train_micro_batch(config, world(), has_tokens=False) == MicroBatchSize(rows=8)  # the whole global batch
    assert eval_micro_batch(config, has_tokens=False) == MicroBatchSize(rows=32)
