"""The benchmarks run; their figures are nobody's business here."""

import json
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel, BertTokenizer

import drawbar
from conftest import write_text

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import busy_neighbour
import loss_head
import memory_of_data
from against_trainer import GPT2
from against_trainer import compare as compare_losses
from sst2_accuracy import compare as compare_accuracies
from training import measure


def test_training_is_measured() -> None:
    found = measure("cpu", "fp32", rows=1, micro_batches=2, pairs=5)
    assert found["pairs"] == 5
    assert float(found["tokens_per_second"]) > 0
    assert float(found["ratio"]) > 0


def test_ways_to_compute_the_loss_are_compared() -> None:
    found = loss_head.measure_time(loss_head.Head(500, 0.5, hidden=8, length=64), rounds=1)
    assert found["seconds"].keys() == {"plain", "chunked"}
    assert found["loss_difference"] < 1e-6


def test_losses_are_those_of_transformers_trainer(tmp_path: Path) -> None:
    """Acceptance: the same blocks in the same order, fp32: within 1e-3; here it is the last digits of fp32."""
    train, valid = write_text(tmp_path / "train.txt", 90, seed=1), write_text(tmp_path / "valid.txt", 17, seed=2)
    tiny = {**GPT2, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    found = compare_losses(train, valid, steps=12, folder=tmp_path, model=tiny, length=32, batch=8)
    for name in ("training", "validation"):
        assert found["drawbar"][name] == pytest.approx(found["transformers"][name], rel=1e-5)


def test_accuracies_are_compared(tmp_path: Path) -> None:
    words = ["good", "bad", "film", "the", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "model")
    for name, size in (("train", 64), ("dev", 8), ("test", 8)):
        lines = [f"the {words[number % 2]} film \t{1 - number % 2}\n" for number in range(size)]
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
    results = compare_accuracies(tmp_path, tmp_path / "model", [0], None, tmp_path / "runs")
    assert [result["system"] for result in results] == ["drawbar", "transformers"]
    assert all(0 <= result[split] <= 1 for result in results for split in ("dev", "test"))


def test_speed_beside_a_neighbour_is_measured() -> None:
    found = busy_neighbour.measure(rounds=1, seconds=0.1, names=["drawbar"])
    assert all(found["drawbar"][where][0] > 0 for where in ("quiet", "busy"))


def test_the_memory_of_all_processes_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole runs are not made here: they import torch five times."""
    memory_of_data.write_records(tmp_path / "train.jsonl", 100_000)
    assert 100_000 <= (tmp_path / "train.jsonl").stat().st_size < 103_000
    assert set(json.loads((tmp_path / "train.jsonl").read_text().splitlines()[-1])) == {"text"}
    (tmp_path / "config.yaml").write_text(memory_of_data.CONFIG)
    drawbar.load_config(str(tmp_path / "config.yaml"))
    child = "import time; text = open('train.jsonl').read() * 600; time.sleep(0.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    found = memory_of_data.watch([sys.executable, "-c", parent], tmp_path)
    assert found.memory > 60e6
    assert found.read > 100_000
    memory_of_data.show({"": {"import": vars(found)}, "1 MB": {"start": vars(found)}})
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["1", "MB", "start"]
