"""W2: fine-tuning with samples of very different lengths, in random batches: SST-2 with MiniLM."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.real_data import NoData, minilm, sst2
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import ratio
from benchmarks.peers.comparison import PEERS, Contender, Measured, best_of, compare, where_time_goes
from benchmarks.peers.workload import Settings, Workload

GROUPED = {"arguments": {"train_sampling_strategy": "group_by_length"}}
ROWS = 32


def measure(options: Options) -> Report:
    return fine_tuning("W2", "SST-2 with MiniLM", classification, options)


def fine_tuning(
    part: str, name: str, make: Callable[[Options, int], tuple[Workload, list[str]]], options: Options
) -> Report:
    """The report of a part.

    Args:
        make: (options, steps of an epoch) → the workload, and the settings that build its model.
    """
    report = Report(part, f"fine-tuning with samples of very different lengths, {ROWS} a step: {name}")
    try:
        workload, builder = make(options, 2 if options.quick else 12)
    except NoData as error:
        report.notes.append(f"It is not measured: {error}.")
        return report
    _measure(name, workload, builder, options, report)
    report.notes.append(
        "Two passes over the same samples, of which the second is timed; contenders that group samples by length train "
        "on the same ones. No dropout; AdamW, clipping at 1."
    )
    return report


def classification(options: Options, steps: int) -> tuple[Workload, list[str]]:
    overrides = [
        *("task.text_column=sentence", "task.labels=[0, 1]", f"data.train={sst2(options)}"),
        *("data.columns=[sentence, label]", "data.sequence_length=128", f"data.limit.train={steps * ROWS}"),
    ]
    return two_epochs(options, "sequence_classification", overrides, steps), [f"task.model={minilm()}"]


def two_epochs(options: Options, task: str, overrides: list[str], steps: int) -> Workload:
    folder = str(options.new_folder("workload"))
    return Workload(folder, task, rows=ROWS, steps=2 * steps, warm_up=steps, overrides=overrides, lr=1e-4)


def _measure(name: str, workload: Workload, builder: list[str], options: Options, report: Report) -> None:
    arguments = {"workload": asdict(workload), "builder": builder}
    options.run(Call("benchmarks.peers.workload:prepare", arguments))
    trainer = "Hugging Face Trainer"
    contenders = [Contender(peer, Settings("fp32")) for peer in PEERS]
    contenders += [Contender(peer, Settings("bf16")) for peer in ("drawbar", "loop by hand", trainer)]
    contenders += [
        Contender(trainer, Settings(precision, options=GROUPED), "grouped", own_batches=True)
        for precision in ("fp32", "bf16")
    ]
    measured = compare(workload, contenders, "loop by hand fp32", options, report.notes)
    twins = {p: measured[f"loop by hand {p}"] for p in ("fp32", "bf16")}
    rows = [one.row(twins[one.contender.settings.precision]) for one in measured.values()]
    report.tables.append(Table(name, rows))
    shares = options.run(Call("benchmarks.parts.w2_variable_length:useful_tokens", {"workload": asdict(workload)}))
    shares = {who: shares[who] for who in ("drawbar", "rows as they come")}
    report.tables.append(
        Table(f"{name}: computed tokens that are not padding", [{"batches": k, "share": v} for k, v in shares.items()])
    )
    _add_checks(name, report, measured, shares["drawbar"])
    best = best_of(measured, "drawbar").contender.settings
    report.tables.append(where_time_goes(workload, best, [], options, report.notes))


def _add_checks(name: str, report: Report, measured: dict[str, Measured], share: float) -> None:
    ours = best_of(measured, "drawbar")
    usual = measured.get("Hugging Face Trainer fp32")
    if usual is not None:
        theirs = best_of(measured, "Hugging Face Trainer")
        best, default = ratio(ours.speeds, theirs.speeds).median, ratio(ours.speeds, usual.speeds).median
        report.checks += [
            Check(f"{name}: {ours.contender.name} ÷ {theirs.contender.name}, the best of both", best, 1.0),
            Check(f"{name}: {ours.contender.name} ÷ Trainer's defaults", default, 2.0),
        ]
    report.checks.append(Check(f"{name}: computed tokens that are not padding", share, 0.95))


def useful_tokens(workload: dict[str, Any]) -> dict[str, float]:
    """The share of what the model is given that is no padding: in drawbar's micro-batches, and in the batches of those
    who pad rows as they come."""
    from benchmarks.peers.of_drawbar import overrides
    from benchmarks.peers.opened import open_task
    from drawbar.train.batches import make_loader

    work = Workload.of(workload)
    run = open_task(overrides(work, Settings(), f"{work.folder}/runs"))
    loader = make_loader(run.task, run.config, run.world, run.console)
    ours = [micro.batch for _, micros in loader.steps(0, work.warm_up) for micro in micros]
    theirs = [batch for batches in work.step_batches(1, 0, 1) for batch in batches][: work.warm_up]
    useful = sum(map(_useful, theirs))  # the samples are the same
    return {"drawbar": useful / sum(map(_given, ours)), "rows as they come": useful / sum(map(_given, theirs))}


def _given(batch: Any) -> int:
    """The tokens that the model computes with."""
    return sum(batch[name].numel() for name in ("input_ids", "decoder_input_ids") if name in batch)


def _useful(batch: Any) -> int:
    """The tokens of padded rows that are no padding."""
    targets = int((batch["labels"] != -100).sum()) if "decoder_input_ids" in batch else 0
    return int(batch["attention_mask"].sum()) + targets
