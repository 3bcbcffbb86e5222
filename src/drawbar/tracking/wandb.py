"""Weights & Biases (https://docs.wandb.ai), online or offline."""

import logging
from collections.abc import Mapping
from html import escape
from typing import Any, ClassVar, Literal

from drawbar.tracking.tracker import TrackedRun, Tracker
from drawbar.tracking.trackers import FINISH_SECONDS

logger = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """Logs to Weights & Biases. A resumed run continues the same run there, whose id is kept in the run directory.

    The API key comes from ``wandb login`` or from the environment variable ``WANDB_API_KEY``.

    Args:
        project: the project that the run belongs to.
        entity: the user or team that the project belongs to; by default, that of the API key.
        mode: ``online``; or ``offline``: to write into the run directory, for ``wandb sync``.
    """

    packages: ClassVar[Mapping[str, str]] = {"wandb": "drawbar[wandb]"}

    def __init__(self, project: str, entity: str | None = None, mode: Literal["online", "offline"] = "online") -> None:
        if mode not in ("online", "offline"):
            raise ValueError(f"mode is {mode!r}, and must be online or offline")
        self._project, self._entity, self._mode = project, entity, mode

    def start(self, run: TrackedRun) -> None:
        import wandb

        if self._mode == "offline":
            self._run = self._init(run, "offline")
            return
        try:
            if not wandb.login(prompt=False):  # otherwise it would ask for a key in the middle of the run
                raise wandb.errors.AuthenticationError("there is no API key: `wandb login`, or set WANDB_API_KEY")
            self._run = self._init(run, "online")
        except wandb.Error as error:
            logger.warning(
                "Weights & Biases does not accept this run, which is kept in %s for `wandb sync`: %s",
                *(run.folder / "wandb", str(error).splitlines()[0]),
            )
            self._run = self._init(run, "offline")

    def _init(self, run: TrackedRun, mode: Literal["online", "offline"]) -> Any:
        import wandb

        return wandb.init(
            project=self._project,
            entity=self._entity,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            mode=mode,
            config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True, finish_timeout=FINISH_SECONDS),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        import wandb

        self._run.log({name: wandb.Html(f"<pre>{escape(text)}</pre>") for name, text in texts.items()}, step=step)

    def finish(self) -> None:
        self._run.finish()
