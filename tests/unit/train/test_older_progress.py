"""A checkpoint of an older drawbar says how far its run was in other words."""

from drawbar.train.step import RunProgress


def test_targets_were_called_weight() -> None:
    older = {"step": 3, "weight": 286.0, "skipped": 1, "best_step": 2, "best_score": 4.5, "evaluations_since_best": 1}
    progress = RunProgress.of_state({**older, "evaluated_step": 3})
    assert progress == RunProgress(3, 286.0, 1, 2, 4.5, 1, 3)
    assert RunProgress.of_state(progress.state()) == progress
