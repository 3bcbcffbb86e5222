"""Scores of a run's model on tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness)."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from drawbar.commands.trained_run import TrainedRun
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Evaluation, write_results
from drawbar.tasks.causal_lm import DecoderTask
from drawbar.tracking.console import Console

FOLDER = "harness"


def score_on_harness(run: TrainedRun, names: list[str], fewshot: int | None, limit: int | None) -> dict[str, float]:
    """Scores as ``TASK/METRIC``; also written to ``RUN/eval/harness/scores.json``.

    Args:
        names: tasks and groups that lm-eval knows, or YAML files of tasks.
        fewshot: examples in each prompt; None for what each task says.
        limit: questions of each task; None for all.

    Raises:
        UserError: lm-eval is not installed, the model writes no text, or there is no such task.
    """
    lm_eval, wrapper = _import_harness()
    task, model = run.task, run.model
    if not isinstance(task, DecoderTask) or task.head != "causal_lm" or not isinstance(model, PreTrainedModel):
        raise UserError(
            f"lm-eval asks language models, and {type(task).__name__} trains no such model",
            where="--harness",
            remedy="leave it out: `drawbar eval` scores any run on its own data",
        )
    manager = lm_eval.tasks.TaskManager()
    unknown = [name for name in names if not Path(name).is_file() and name not in manager.all_tasks]
    if unknown:
        raise UserError(
            f"lm-eval has no task {unknown[0]!r}",
            where="--harness",
            remedy="`lm_eval ls tasks` lists its tasks; a task of your own is a YAML file",
        )
    rows = run.config.eval.micro_batch or 1
    results = lm_eval.simple_evaluate(
        wrapper(pretrained=model, tokenizer=task.tokenizer_to_export(), batch_size=rows),
        tasks=names,
        num_fewshot=fewshot,
        limit=limit,
        task_manager=manager,
        apply_chat_template=task.reads_chats,
        log_samples=False,
        bootstrap_iters=0,
    )
    scores = _flat(results["results"])
    write_results(run.config.run_dir / "eval" / FOLDER, Evaluation(scores, []), run.step)
    return scores


def _import_harness() -> tuple[Any, Any]:
    try:
        import lm_eval
        import lm_eval.tasks
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(
            f"lm-eval cannot be used: {error}",
            where="--harness",
            remedy="install it: pip install 'drawbar[harness]'",
        ) from error
    return lm_eval, HFLM


def _flat(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """lm-eval's names of metrics have the filter behind a comma: ``acc_norm,none``."""
    return {
        f"{task}/{metric.removesuffix(',none').replace(',', '/')}": float(value)
        for task, values in results.items()
        for metric, value in values.items()
        if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
    }


def print_scores(console: Console, step: int, scores: dict[str, float]) -> None:
    console.evaluation(step, {f"eval/{FOLDER}/{name}": value for name, value in scores.items()})
