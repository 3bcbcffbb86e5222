"""W9: evaluation and generation."""

import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.common.fresh_process import Call
from benchmarks.common.options import Options
from benchmarks.common.report import Check, Report, Table
from benchmarks.common.statistic import Statistic, interleave, ratio
from benchmarks.parts.w1_fixed_length import language_model
from benchmarks.peers.byte_rows import write_rows
from benchmarks.peers.workload import Workload

WAYS = ("drawbar", "by hand", "Hugging Face Trainer")
TOLERANCE = 1e-5
"""Of the mean loss, relative: a sum in another order."""
PROMPTS, PROMPT, NEW_TOKENS = 8, 16, 64


def measure(options: Options) -> Report:
    report = Report("W9", "evaluation and generation")
    workload, builder = language_model(options)
    rows = 16 if options.quick else 128
    length = int(workload.overrides[-1].rpartition("=")[2])
    validation = write_rows(options.new_folder("validation") / "validation.jsonl", rows, length)
    workload = replace(workload, overrides=[*workload.overrides, f"data.validation={validation}"])
    arguments = {"workload": asdict(workload)}
    options.run(Call("benchmarks.peers.workload:prepare", {**arguments, "builder": builder}))
    call = partial(Call, "benchmarks.parts.w9_evaluation:evaluate_and_generate")
    found = interleave({way: partial(options.run, call({**arguments, "way": way})) for way in WAYS}, options.rounds)
    by_hand, table = found["by hand"], []
    for way, results in found.items():
        differs = abs(results[0]["loss"] / by_hand[0]["loss"] - 1)
        row: dict[str, Any] = {"way": way, "loss differs by": differs}
        for key in ("evaluated targets/s", "generated tokens/s"):
            if key in results[0]:
                speeds, theirs = [one[key] for one in results], [one[key] for one in by_hand]
                row |= {key: Statistic.of(speeds), f"{key.split()[0]} ÷ by hand": ratio(speeds, theirs)}
        if results[0].get("tokens", by_hand[0]["tokens"]) != by_hand[0]["tokens"]:
            report.notes.append(f"{way} generates other tokens than the loop by hand: its rate does not count.")
        table.append(row if differs <= TOLERANCE else {**row, "evaluated targets/s": "its loss differs"})
        if way == "drawbar" and differs <= TOLERANCE:
            for key in ("evaluated", "generated"):
                report.checks.append(Check(f"{key}: drawbar ÷ by hand", row[f"{key} ÷ by hand"].median, 0.98))
    report.tables.append(
        Table(f"{rows} rows of {length} tokens; {PROMPTS} prompts of {PROMPT}, {NEW_TOKENS} new", table)
    )
    return report


def evaluate_and_generate(workload: dict[str, Any], way: str) -> dict[str, Any]:
    """Mean loss, and the rates, each of a second call: the first warms up."""
    import torch

    work = Workload.of(workload)
    prompts = torch.stack([sample["input_ids"][:PROMPT] for sample in work.samples()[:PROMPTS]])
    evaluate, generate = {"drawbar": _drawbar, "by hand": _by_hand, "Hugging Face Trainer": _trainer}[way](work)
    held_out = torch.load(work.held_out_path, weights_only=True)
    targets = sum(int((sample["labels"] != -100).sum()) for sample in held_out)
    loss, seconds = [_timed(evaluate) for _ in range(2)][-1]
    found = {"loss": loss, "evaluated targets/s": targets / seconds}
    if generate is not None:
        tokens, seconds = [_timed(lambda: generate(prompts)) for _ in range(2)][-1]
        found["tokens"] = tokens.tolist()
        found["generated tokens/s"] = PROMPTS * NEW_TOKENS / seconds
    return found


def _timed(work: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start


GREEDY = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}


def _drawbar(work: Workload) -> tuple[Any, Any]:
    from benchmarks.peers.of_drawbar import overrides
    from benchmarks.peers.opened import open_task
    from benchmarks.peers.workload import Settings
    from drawbar.evaluation.scoring import evaluate
    from drawbar.train.batches import eval_micro_batch, load_split, make_augment

    run = open_task(overrides(work, Settings(options={"overrides": ["eval.micro_batch=8"]}), f"{work.folder}/runs"))
    engine = run.engine()
    split = load_split(run.task, "validation", run.config, run.world, run.console)
    micro, augment = eval_micro_batch(run.config, has_tokens=True), make_augment(run.task, run.config, train=False)

    def score() -> float:
        found = evaluate(engine, run.task, split, run.world, micro, augment)
        assert found is not None  # nobody told it to stop
        return found.scores["loss"]

    def write(prompts: Any) -> Any:
        with engine.inference() as model:
            return model.generate(prompts.to(engine.world.device), **GREEDY)

    return score, write


def _by_hand(work: Workload) -> tuple[Any, Any]:
    import torch

    from benchmarks.peers.recorder import default_device
    from benchmarks.peers.workload import loss_sum

    device = default_device()
    model = work.model().to(device).eval()
    samples = torch.load(work.held_out_path, weights_only=True)

    @torch.inference_mode()
    def score() -> float:
        total = count = 0.0
        for first in range(0, len(samples), 8):
            batch = {name: tensor.to(device) for name, tensor in work.collate(samples[first : first + 8]).items()}
            labels = batch.pop("labels")
            total += float(loss_sum(work.task, model(**batch, use_cache=False).logits, labels))
            count += float((labels[:, 1:] != -100).sum())
        return total / count

    return score, lambda prompts: model.generate(prompts.to(device), **GREEDY)


def _trainer(work: Workload) -> tuple[Any, Any]:
    import torch
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=work.folder,
        per_device_eval_batch_size=8,
        prediction_loss_only=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    samples = torch.load(work.held_out_path, weights_only=True)
    trainer = Trainer(work.model(), arguments, eval_dataset=samples, data_collator=work.collate)
    return lambda: trainer.evaluate()["eval_loss"], None
