"""The benchmarks run; their figures are nobody's business here."""

import json
import sys
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

import drawbar
from conftest import write_text

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import busy_neighbour, comparison_table, moments_accuracy, performance_page
from benchmarks.__main__ import measure
from benchmarks.common.command import watch
from benchmarks.common.fresh_process import Call, MeasurementFailed, in_this_process
from benchmarks.common.limits import processor
from benchmarks.common.options import Options
from benchmarks.common.turns import in_turns, one_after_another
from benchmarks.parts import w7_data
from benchmarks.peers.comparison import Contender, compare
from benchmarks.peers.made_up_words import write_documents
from benchmarks.peers.workload import Settings, Workload, prepare


@pytest.mark.exhaustive
def test_losses_are_those_of_transformers_trainer_and_of_a_loop_by_hand(tmp_path: Path) -> None:
    """Acceptance: the same samples in the same order, fp32: within 1e-3; here it is the last digits of fp32."""
    data = {
        "train": write_text(tmp_path / "train.txt", 200, seed=1),
        "validation": write_text(tmp_path / "valid.txt", 17, seed=2),
    }
    overrides = [f"data.{split}={path}" for split, path in data.items()]
    overrides += ["data.sequence_length=32", "device=cpu"]
    workload = Workload(
        str(tmp_path), "causal_lm", rows=8, steps=12, warm_up=2, overrides=overrides, lr=1e-3, weight_decay=0.1
    )
    model = "{n_embd: 16, n_layer: 2, n_head: 2, n_positions: 32}"
    builder = ["task.model=gpt2", f"task.from_scratch={model}", "task.tokenizer={train: byte_bpe, vocab_size: 300}"]
    prepare(asdict(workload), builder)
    linear = "optim={lr: 1e-3, weight_decay: 0.1, warmup: 5, schedule: linear}"
    ours = Settings(options={"overrides": [linear]})
    theirs = Settings(options={"arguments": {"lr_scheduler_type": "linear", "warmup_steps": 5}})
    contenders = [Contender("drawbar", ours, "linear"), Contender("Hugging Face Trainer", theirs, "linear")]
    take_turns = partial(one_after_another, run=in_this_process)
    options = Options(tmp_path / "scratch", rounds=1, run=in_this_process, take_turns=take_turns)
    found = compare(workload, contenders, "drawbar fp32, linear", options, [])
    drawbar_run, trainer = (found[contender.name] for contender in contenders)
    assert trainer.disagreement == pytest.approx(0, abs=1e-5)
    assert trainer.results[0]["held_out_loss"] == pytest.approx(drawbar_run.results[0]["held_out_loss"], rel=1e-5)
    constant = [Contender("drawbar", Settings()), Contender("loop by hand", Settings(micro_batches=2), "2 × 4")]
    found = compare(workload, constant, "drawbar fp32", options, [])
    by_hand = found[constant[1].name]
    assert by_hand.disagreement == pytest.approx(0, abs=1e-5)
    assert by_hand.row(by_hand)["÷ by hand"].median == 1
    assert all(speed > 0 for speed in by_hand.speeds)


def test_contenders_take_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    calls = {
        name: Call("tests.turn_takers:work", {"log": str(log), "name": name, "steps": steps})
        for name, steps in (("one", 6), ("fails", 6), ("other", 5))
    }
    found = in_turns(calls)
    assert isinstance(found["fails"], MeasurementFailed)
    assert "no more" in str(found["fails"])
    for name in ("one", "other"):
        result = found[name]
        assert isinstance(result, dict), result
        assert result["waited"] > 0
    turns = [name for name, _ in groupby(line.split()[0] for line in log.read_text().splitlines())]
    assert turns == ["one", "fails", "other", "one", "fails", "other", "one", "other"]


@pytest.mark.exhaustive
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
    from benchmarks.sst2_accuracy import compare  # here: it imports transformers' Trainer, which takes seconds

    results = compare(tmp_path, tmp_path / "model", [0], None, tmp_path / "runs")
    assert [result["system"] for result in results] == ["drawbar", "transformers"]
    assert all(0 <= result[split] <= 1 for result in results for split in ("dev", "test"))


@pytest.mark.exhaustive
def test_formats_of_moments_are_compared(tmp_path: Path) -> None:
    losses = moments_accuracy.compare(1, 3, tmp_path, ("data.limit={train: 3, validation: 1}",))
    assert losses[moments_accuracy.STOCHASTIC] != losses[moments_accuracy.NEAREST]
    assert losses[moments_accuracy.STOCHASTIC] == pytest.approx(losses[moments_accuracy.FP32], rel=1e-2)


@pytest.mark.exhaustive  # its processes import torch anew
def test_speed_beside_a_neighbour_is_measured() -> None:
    found = busy_neighbour.measure(rounds=1, seconds=0.1, names=["drawbar"])
    assert all(found["drawbar"][where][0] > 0 for where in ("quiet", "busy"))


def test_the_memory_of_all_processes_is_measured(tmp_path: Path) -> None:
    """Whole runs are not made here: they import torch five times."""
    data = tmp_path / "train.jsonl"
    write_documents(data, 20_000)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    assert 20_000 <= sum(len(record["text"].split()) for record in records) < 20_300
    drawbar.load_config(None, w7_data.run_settings(tmp_path))
    child = f"import time; text = open({str(data)!r}).read() * 600; time.sleep(0.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    found = watch([sys.executable, "-c", parent], tmp_path)
    assert found.memory > 60e6
    assert found.read > 100_000
    with pytest.raises(MeasurementFailed, match="no such thing"):
        watch([sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path)


def test_the_page_of_figures_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    assert page.read_text("utf-8") == performance_page.render(), "run `make docs`"


@pytest.mark.exhaustive
def test_a_part_ends_on_the_page(tmp_path: Path) -> None:
    """W10 at 8 and 64 ranks: measured, written, drawn and shown as the whole suite is."""
    options = Options(tmp_path, rounds=1, quick=True, run=in_this_process)
    try:
        assert measure("W10", options, {"memory GB/s": 10.0}, tmp_path)
    finally:
        torch.distributed.destroy_process_group()  # torch's fake one
    page = performance_page.render(tmp_path)
    assert "## W10" in page
    assert "memory GB/s 10" in page
    assert "| order of a step | every rank |" in page
    assert "Not measured yet: W1, " in page
    report = json.loads((tmp_path / "W10.json").read_text())
    assert report["machine"]["processor"] == processor()
    assert report["curves"][0]["lines"]["mesh"][1][0] == 64


def test_the_comparison_is_up_to_date() -> None:
    page = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert comparison_table.BEGIN in page
    assert page == comparison_table.replace_in(page), "run `make docs`"
