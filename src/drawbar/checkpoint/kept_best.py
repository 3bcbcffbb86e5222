"""The best checkpoint, as recorded in ``best.json``: a rotation must not delete it."""

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.errors import UserError


def steps_kept_as_best(directory: CheckpointDirectory) -> set[int]:
    """The step that ``best.json`` names, if there is one. Where that file is damaged, all steps, as any of them may be
    the best one: the next save writes it anew."""
    try:
        best = directory.best_record()
    except UserError:
        return set(directory.steps())
    return set() if best is None else {best.step}
