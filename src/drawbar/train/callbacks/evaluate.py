"""Evaluation on the validation data: when it is due, which score is the best, and when to stop early."""

import math
from collections.abc import Sequence

from drawbar.errors import UserError, visible
from drawbar.evaluation.scoring import Evaluation, EvaluationFailed, WrittenText, unknown_metric, write_results
from drawbar.runtime.log import log_to_file, logger
from drawbar.train.callback import Callback, RunHandle
from drawbar.train.run import Run, evaluation_is_due, patience_is_exhausted
from drawbar.train.step import RunProgress, StepInfo
from drawbar.train.stop import Reason
from drawbar.util.best_score import BestScore


class EvaluateCallback(Callback):
    """Evaluation every few steps and at the end, never twice at one step; keeps the best score, and stops early."""

    def __init__(self, run: Run) -> None:
        self._config = run.config.eval
        self._run = run
        self._folder = run.config.run_dir / "eval" / "validation"
        self._warned_of_nan = False

    def on_train_start(self, run: RunHandle) -> None:
        self._show_best(run.progress)
        last = run.step >= run.total_steps
        is_due = self._config.at_start if run.step == 0 else evaluation_is_due(self._config, run.progress, last)
        if is_due:
            self._evaluate(run.progress)

    def on_step(self, run: RunHandle, info: StepInfo) -> None:
        if evaluation_is_due(self._config, info.progress, info.last):
            self._evaluate(info.progress)

    def _evaluate(self, progress: RunProgress) -> None:
        try:
            evaluation = self._run.evaluate()
        except EvaluationFailed as error:
            log_to_file(error.trace)
            self._fail(progress, error)
            return
        if evaluation is None:
            logger.info("the evaluation of step %d is abandoned; it runs when the run resumes", progress.step)
            return
        if self._config.metric not in evaluation.scores:
            remedy = "set eval.metric to one of them, and start over under another run.name"
            self._fail(progress, unknown_metric(self._config.metric, evaluation.scores, remedy))
            return
        score = evaluation.scores[self._config.metric]
        progress.evaluated_step = progress.step
        values = {f"eval/validation/{name}": score for name, score in evaluation.scores.items()}
        with self._run.world.working("writing the scores"):
            self._run.trackers.log(progress.step, values)
            self._run.console.evaluation(progress.step, values)
            self._show_texts(evaluation.texts, progress.step)
            if self._run.world.is_rank0:
                self._write(evaluation, progress.step)
        self._run.saver.confirm_best(progress)
        self._compare(progress, score)
        self._show_best(progress)
        self._run.announce_scores(values)

    def _show_texts(self, texts: Sequence[WrittenText], step: int) -> None:
        for one in texts:
            self._run.console.message(f"  {_on_one_line(one.prompt, 60)} → {_on_one_line(one.text, 200)}")
        named = {f"samples/{number}": f"{one.prompt}\n\n{one.text}" for number, one in enumerate(texts, start=1)}
        if named:
            self._run.trackers.log_texts(step, named)

    def _show_best(self, progress: RunProgress) -> None:
        if progress.best_score is not None and progress.best_step is not None:
            self._run.console.best(
                BestScore(step=progress.best_step, metric=self._config.metric, score=progress.best_score)
            )

    def _fail(self, progress: RunProgress, error: UserError) -> None:
        logger.warning("the evaluation of step %d failed: the run saves and stops", progress.step)
        self._run.stop.fail(error)

    def _write(self, evaluation: Evaluation, step: int) -> None:
        if not self._run.owns_directory():
            return
        try:
            write_results(self._folder, evaluation, step)
        except OSError as error:
            logger.warning("%s could not be written; the run continues: %s", self._folder, error.strerror)

    def _compare(self, progress: RunProgress, score: float) -> None:
        if math.isnan(score) and not self._warned_of_nan:
            self._warned_of_nan = True
            what = "the %s of step %d is nan (as where all predictions are the same), so this step cannot be the best"
            logger.warning(what, self._config.metric, progress.step)
        best = progress.best_score
        better = best is None or (score < best if self._config.mode == "min" else score > best)
        if better and not math.isnan(score):
            progress.best_score, progress.best_step = score, progress.step
            progress.evaluations_since_best = 0
            return
        progress.evaluations_since_best += 1
        if patience_is_exhausted(self._config, progress):
            logger.info(
                "early stop: no better %s in %d evaluations", self._config.metric, progress.evaluations_since_best
            )
            self._run.stop.request(Reason.EARLY)


def _on_one_line(text: str, length: int) -> str:
    line = visible(text).replace("\n", "↵")
    return line if len(line) <= length else f"{line[: length - 1]}…"
