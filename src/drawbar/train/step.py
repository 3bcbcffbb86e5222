"""``RunProgress``, the counters of the training loop, and ``StepInfo``, which callbacks receive for each step."""

from dataclasses import asdict, dataclass, field
from typing import Any

from drawbar.engines.results import StepResult


@dataclass
class RunProgress:
    """Progress counters of a run; saved in every checkpoint."""

    step: int = 0
    """Optimizer steps made, including skipped ones."""
    num_targets: float = 0.0
    """Targets (tokens, examples or decisions) trained on."""
    skipped: int = 0
    """Updates skipped because of fp16 overflow, or left out at a spike (``train.on_spike``)."""
    best_step: int | None = None
    best_score: float | None = None
    evaluations_since_best: int = 0
    evaluated_step: int | None = None
    """The step of the latest evaluation, so that none runs twice."""
    recent: list[list[float]] = field(default_factory=list)
    """Loss, gradient norm, and 1 for a spike, of the latest steps, if ``train.on_spike`` decides from them. Replaced in
    each step, never changed."""

    went_back_to: int | None = None
    """The checkpoint that the run has last gone back to: it does so once for each."""

    def advance(self, result: StepResult) -> None:
        self.step += 1
        self.num_targets += result.num_targets
        self.skipped += result.skipped or result.rejected

    def state(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StepInfo:
    """One finished step."""

    step: int
    result: StepResult
    progress: RunProgress
    last: bool
    """Whether this is step ``total_steps``, which a run that stops early may never make."""
    num_tokens: int = 0
    """Tokens of the global batch, without padding; number of samples if they have no tokens."""
    data_wait_seconds: float = 0.0
    """How long this rank waited for the step's batches: data loading time that does not overlap with training."""
