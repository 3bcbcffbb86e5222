"""MLflow (https://mlflow.org): a tracking server, or a database file."""

import logging
import os
import time
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlsplit

from drawbar.tracking.tracker import TrackedRun, Tracker

logger = logging.getLogger(__name__)

RUN_TAG = "drawbar.run_id"
SECONDS_TO_ANSWER = 10.0
GATEWAY_ERRORS = (502, 503, 504)
"""HTTP statuses with which a proxy reports that the server behind it does not answer."""
MOST_PARAMETERS = 100
"""In a single request."""
LONGEST_PARAMETER = 6000
"""Maximum length of a parameter's value, in characters."""


class MLflowTracker(Tracker):
    """Logs to MLflow. A resumed run continues the same MLflow run, which is found by a tag.

    Args:
        experiment: the name of the experiment that the run belongs to.
        uri: of the server (``http://…``) or of a database (``sqlite:///mlflow.db``); by default, the environment
            variable ``MLFLOW_TRACKING_URI``. MLflow also takes a user, a password or a token from the environment.
    """

    packages: ClassVar[Mapping[str, str]] = {"mlflow": "drawbar[mlflow]"}

    def __init__(self, experiment: str = "drawbar", uri: str | None = None) -> None:
        if uri is None and "MLFLOW_TRACKING_URI" not in os.environ:
            raise ValueError("neither the option uri nor the environment variable MLFLOW_TRACKING_URI is set")
        self._experiment, self._uri = experiment, uri

    def service_problem(self) -> str | None:
        import requests  # mlflow depends on it

        uri = self._uri or os.environ["MLFLOW_TRACKING_URI"]
        address = urlsplit(uri)
        if address.scheme not in ("http", "https"):
            return None
        reason: object
        try:
            found = requests.head(uri, timeout=SECONDS_TO_ANSWER)
            reason = f"{found.status_code} {found.reason}" if found.status_code in GATEWAY_ERRORS else None
        except requests.exceptions.SSLError:
            reason = None  # it answers, and MLflow has settings of its own for certificates
        except requests.exceptions.RequestException as error:
            reason = error
        server = address.netloc.rpartition("@")[2]  # without a password
        return None if reason is None else f"the MLflow server {server} does not answer: {reason}"

    def start(self, run: TrackedRun) -> None:
        if problem := self.service_problem():
            logger.warning("%s\n  the run continues, and MLflow retries for some minutes", problem)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        known = self._client.search_runs([number], f"tags.`{RUN_TAG}` = '{run.id}'")
        found = known[0] if known else self._client.create_run(number, tags={RUN_TAG: run.id}, run_name=run.name)
        self._id = found.info.run_id
        if known:
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._log_parameters(run.settings)

    def _log_parameters(self, settings: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        parameters = [Param(name, str(value)[:LONGEST_PARAMETER]) for name, value in flat(settings).items()]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[start : start + MOST_PARAMETERS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._client.log_text(self._id, text, f"{name}/step-{step:08d}.txt")

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings by their dotted keys."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
