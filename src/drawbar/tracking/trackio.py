"""Trackio (https://huggingface.co/docs/trackio): a database on this machine, or a Space of the Hugging Face Hub."""

from collections.abc import Mapping
from typing import ClassVar

from drawbar.tracking.tracker import TrackedRun, Tracker


class TrackioTracker(Tracker):
    """Logs to Trackio. A resumed run continues the same Trackio run, which is found by its name in the project.

    Args:
        project: the project that the run belongs to.
        space_id: the Space to log to; by default, a database on this machine, which ``trackio show`` displays. The
            Hub's token comes from ``hf auth login`` or from the environment variable ``HF_TOKEN``.
    """

    packages: ClassVar[Mapping[str, str]] = {"trackio": "drawbar[trackio]"}

    def __init__(self, project: str, space_id: str | None = None) -> None:
        self._project, self._space_id = project, space_id

    def start(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=self._project,
            name=run.name,
            space_id=self._space_id,
            config=dict(run.settings),
            resume="never" if run.resume_step is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(text) for name, text in texts.items()}, step)

    def finish(self) -> None:
        self._run.finish()
