"""W1: language modelling with rows of one length."""

from dataclasses import asdict, replace

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, ratio
from benchmarks.peers.byte_rows import write_rows
from benchmarks.peers.comparison import (
    FLOOR,
    ONLY_ON_A_GPU,
    PEERS,
    Contender,
    Measured,
    best_of,
    compare,
    compiled_unless_slower,
    where_time_goes,
)
from benchmarks.peers.workload import Settings, Workload

PRECISIONS = ("fp32", "bf16")


def language_model(options: Options, rows: int = 8, steps: int = 14, warm_up: int = 4) -> tuple[Workload, list[str]]:
    """A small Llama on the bytes of Python's own library; and drawbar's settings that build it."""
    hidden, layers, length = (64, 2, 64) if options.quick else (256, 4, 256)
    steps, warm_up = (5, 1) if options.quick else (steps, warm_up)
    folder = options.new_folder("workload")
    model = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers}
    model |= {"num_attention_heads": 4, "max_position_embeddings": length, "vocab_size": 512 if options.quick else 4096}
    sizes = ", ".join(f"{name}: {value}" for name, value in model.items())
    workload = Workload(
        folder=str(folder),
        task="causal_lm",
        rows=rows,
        steps=steps,
        warm_up=warm_up,
        task_type="benchmarks.peers.byte_rows:ByteRows",
        overrides=[
            f"data.train={write_rows(folder / 'train.jsonl', 2 * rows * steps, length)}",
            f"data.sequence_length={length}",
        ],
    )
    return workload, ["task.model=llama", f"task.from_scratch={{{sizes}, tie_word_embeddings: true}}"]


def measure(options: Options) -> Report:
    report = Report("W1", "fixed-length language modelling: a Llama, 8 rows a step")
    workload, builder = language_model(options)
    about = options.run(Call("benchmarks.peers.workload:prepare", {"workload": asdict(workload), "builder": builder}))
    report.notes += [f"{name} is not measured: it needs a GPU." for name in ONLY_ON_A_GPU]
    report.notes.append(f"{about['parameters']:,} parameters; no dropout; AdamW, clipping at 1.")

    contenders = [Contender(peer, Settings(precision)) for precision in PRECISIONS for peer in PEERS]
    contenders += [Contender(peer, Settings("fp32", micro_batches=4), "4 × 2 rows") for peer in PEERS]
    if not options.quick:
        contenders += compiled_unless_slower(workload, list(PEERS), "fp32", options, report.notes)
    contenders += [_floor(Settings(precision)) for precision in PRECISIONS]
    contenders += [_floor(Settings(compiled=True))] * any(one.settings.compiled for one in contenders)
    measured = compare(workload, contenders, "loop by hand fp32", options, report.notes)
    floors = {name: measured.pop(name) for name in list(measured) if name.startswith(FLOOR)}
    report.tables.append(Table("Training", [one.row(_by_hand(measured, one)) for one in measured.values()]))
    rates = [
        {"beside": name.removeprefix(FLOOR), "targets/s": Statistic.of(one.speeds)} for name, one in floors.items()
    ]
    report.tables.append(Table("Steps of the model's own matrix products alone", rates))
    _add_checks(report, measured, floors)
    best = best_of(measured, "drawbar").contender.settings
    report.tables.append(where_time_goes(workload, best, [_floor(best)], options, report.notes))
    return report


def _floor(settings: Settings) -> Contender:
    """The model's matrix products, which take turns with the contenders of these settings."""
    return Contender(FLOOR, replace(settings, micro_batches=1), own_batches=True)


def _by_hand(measured: dict[str, Measured], one: Measured) -> Measured | None:
    """The loop by hand at the same settings."""
    settings = one.contender.settings
    twin = Contender("loop by hand", settings, one.contender.label, ranks=one.contender.ranks)
    return measured.get(twin.name)


def _add_checks(report: Report, measured: dict[str, Measured], floors: dict[str, Measured]) -> None:
    for one in measured.values():
        twin = _by_hand(measured, one)
        if one.contender.peer == "drawbar" and one.counts and twin is not None:
            speed = ratio(one.speeds, twin.speeds).median
            report.checks.append(Check(f"{one.contender.name} ÷ the loop by hand", speed, 0.98))
    ours = best_of(measured, "drawbar")
    if any(one.contender.peer == "Hugging Face Trainer" for one in measured.values()):
        theirs = best_of(measured, "Hugging Face Trainer")
        name = f"{ours.contender.name} ÷ {theirs.contender.name}, the best of both"
        report.checks.append(Check(name, ratio(ours.speeds, theirs.speeds).median, 1.05))
    share = ratio(ours.speeds, floors[_floor(ours.contender.settings).name].speeds).median
    report.checks.append(Check(f"{ours.contender.name} ÷ its matrix products alone", share, 0.75))
