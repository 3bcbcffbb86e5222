"""The common part of the benchmarks: statistics, interleaving, fresh processes, tables, reports."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.__main__ import PARTS, parse
from benchmarks.common.collectives import CollectiveCounter, of_one_step
from benchmarks.common.fresh_process import Call, MeasurementFailed, in_fresh_process, in_this_process, missing
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, cell, growth, interleave, markdown_table, ratio
from benchmarks.common.turns import one_after_another
from benchmarks.peers.comparison import Contender, Measured, best_of, compare
from benchmarks.peers.workload import Settings, Workload


def test_a_statistic_is_median_and_spread() -> None:
    assert Statistic.of([5, 1, 3]) == Statistic(3, 1, 5, 3)
    with pytest.raises(ValueError, match="nothing was measured"):
        Statistic.of([])


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that is half as fast in the second round changes none of them."""
    assert ratio([10, 5, 12], [20, 10, 20]) == Statistic(0.5, 0.5, 0.6, 3)


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    found = interleave({name: lambda name=name: turns.append(name) or len(turns) for name in "AB"}, 2)
    assert turns == ["A", "B", "A", "B"]
    assert found == {"A": [1, 3], "B": [2, 4]}


def test_growth_is_the_exponent() -> None:
    assert growth([(8, 3), (64, 3), (1024, 3)]) == pytest.approx(0)
    assert growth([(8, 16), (64, 128)]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (12345, "12,345"),
        (1234.5, "1,234"),
        (12.34, "12.3"),
        (0.12345, "0.123"),
        (1.2e-7, "1.20e-07"),
        (Statistic(3.0, 1.0, 5.0, 3), "3.000 (1.000–5.000)"),
        (Statistic(3.0, 3.0, 3.0, 1), "3.000"),
    ],
)
def test_cells_of_tables(value: object, shown: str) -> None:
    assert cell(value) == shown


def test_a_function_runs_in_a_process_of_its_own() -> None:
    call = Call("os:getpid_and_more")
    with pytest.raises(MeasurementFailed, match="getpid_and_more"):
        in_fresh_process(call)
    with pytest.raises(MeasurementFailed, match=r"on rank [01] ended with 1"):
        in_fresh_process(Call("no_such_module:function", ranks=2))
    here = in_this_process(Call("json:loads", {"s": '{"answer": 1}'}))
    fresh = in_fresh_process(Call("json:loads", {"s": '{"answer": 1}'}))
    assert here["answer"] == fresh["answer"] == 1
    assert fresh["spawned"] > 0
    assert missing(["json", "no_such_package"]) == ["no_such_package"]


def test_collectives_are_counted_with_their_larger_side() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with CollectiveCounter() as counter:
            dist.all_reduce(torch.zeros(3))
            dist.all_gather_into_tensor(torch.zeros(4), torch.zeros(4))
            dist.all_reduce(torch.zeros(3))
    finally:
        dist.destroy_process_group()
    assert sorted(counter.bytes.values()) == [16, 24]
    assert sorted(counter.calls.values()) == [1, 2]


def test_of_two_runs_the_difference_is_counted() -> None:
    """What is sent at the start and at the end is the same in both."""
    short = {"calls": {"allreduce": 5, "barrier": 3}, "bytes": {"allreduce": 100, "barrier": 0}}
    long = {"calls": {"allreduce": 11, "barrier": 3}, "bytes": {"allreduce": 160, "barrier": 0}}
    assert of_one_step(short, long, more_steps=3) == {"allreduce": {"calls": 2, "bytes": 20}}


def stand_in(losses: dict[str, float], speeds: dict[str, list[float]]):
    """Trains nothing: each module has its loss, and a speed for each round."""

    def run(call: Call) -> dict[str, object]:
        module = call.function.split(":")[0].rpartition(".")[2]
        return {
            "losses": [losses[module]] * 3,
            "targets_per_second": speeds[module].pop(0),
            "step_seconds": [2.0, 1.0, 1.0],
            "first_step_at": 3.0,
            "spawned": 1.0,
            "peak_bytes": 2**20,
        }

    return run


def test_only_those_whose_losses_agree_are_timed(tmp_path: Path) -> None:
    losses = {"of_drawbar": 2.0, "hand_written": 2.00001, "hf_trainer": 2.1}
    speeds = {"of_drawbar": [10.0, 20.0], "hand_written": [10.0, 10.0], "hf_trainer": [99.0, 99.0]}
    names = ("drawbar", "loop by hand", "Hugging Face Trainer")
    contenders = [Contender(peer, Settings()) for peer in names]
    options = Options(tmp_path, rounds=2, take_turns=partial(one_after_another, run=stand_in(losses, speeds)))
    workload = Workload(str(tmp_path), "causal_lm", rows=1, steps=3, warm_up=1, overrides=[])
    found = compare(workload, contenders, "loop by hand fp32", options, [])
    ours, by_hand, wrong = found.values()
    assert (ours.counts, by_hand.counts, wrong.counts) == (True, True, False)
    assert wrong.row(by_hand)["targets/s"] == "its losses differ"
    assert ours.row(by_hand)["÷ by hand"] == Statistic(1.5, 1.0, 2.0, 2)
    assert ours.row(by_hand)["first step after s"].median == 2
    assert best_of(found, "drawbar") is ours
    assert not list(tmp_path.iterdir())


def test_one_that_fails_or_is_absent_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(call: Call) -> dict[str, object]:
        if "of_drawbar" in call.function:
            raise MeasurementFailed("trace\nRuntimeError: no memory")
        return stand_in({"hand_written": 1.0}, {"hand_written": [1.0]})(call)

    monkeypatch.setattr("benchmarks.peers.comparison.missing", lambda packages: list(packages))
    contenders = [Contender(peer, Settings()) for peer in ("drawbar", "loop by hand", "Lightning")]
    workload, notes = Workload(str(tmp_path), "causal_lm", 1, 3, 1, []), list[str]()
    options = Options(tmp_path, 1, take_turns=partial(one_after_another, run=run))
    found = compare(workload, contenders, "loop by hand fp32", options, notes)
    assert list(found) == ["loop by hand fp32"]
    assert notes == [
        "Lightning is absent: lightning is not installed.",
        "drawbar fp32 failed: RuntimeError: no memory",
    ]


def test_a_report_is_json_and_text() -> None:
    report = Report("W0", "nothing", [Table("Speed", [{"run": "a|b", "x": Statistic(1.0, 0.5, 2.0, 3)}])])
    report.checks.append(Check("ratio", 0.9, 0.98))
    fields = json.loads(report.to_json({"machine": {"processor": "P"}}))
    assert fields["tables"][0]["rows"][0]["x"]["median"] == 1
    assert fields["checks"][0]["is_reached"] is False
    assert "≥ 0.98" in report.to_text()
    assert markdown_table(fields["tables"][0]["rows"]).splitlines()[-1] == "| a\\|b | 1.000 (0.500–2.000) |"


def test_the_command_line(tmp_path: Path) -> None:
    options, parsed = parse(["W1", "--quick", "--folder", str(tmp_path)])
    assert (parsed.parts, options.rounds, parsed.results) == (["W1"], 1, None)
    assert options.folder == tmp_path
    with pytest.raises(SystemExit):
        parse(["W99"])
    assert all((Path(__file__).parents[3] / "benchmarks/parts" / f"{name}.py").exists() for name in PARTS.values())


def test_what_counts_needs_no_losses_where_batches_are_chosen() -> None:
    assert Measured(Contender("Hugging Face Trainer", Settings(), own_batches=True), []).counts
