"""What came of a case: for a person, and for a program."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from drawbar.errors import ExitCode
from drawbar.parity.comparison import Comparison
from drawbar.parity.verdict import Divergence
from drawbar.tracking.table import print_table

Verdict = Literal["equal", "diverges", "refused", "crashed"]


@dataclass(frozen=True)
class Result:
    """One case."""

    name: str
    verdict: Verdict
    asked_for: bool = True
    """Whether the user named it: then a refusal is an error."""
    reasons: list[str] = field(default_factory=list)
    module: str = ""
    """The first module that diverges."""
    comparison: dict[str, Any] | None = None

    @staticmethod
    def of(name: str, asked_for: bool, comparison: Comparison, divergence: Divergence | None) -> "Result":
        """Args: divergence: None for a case that passes."""
        if divergence is None:
            return Result(name, "equal", asked_for, comparison=asdict(comparison))
        reasons = [divergence.text]
        for kind, worst in comparison.exceeded().items():
            reasons.append(f"{LABELS[kind]}: {worst.value:.1e}, more than {worst.limit:.0e}, at {worst.where}")
        reasons += [note.text for note in comparison.notes if note.text not in reasons][:SHOWN_NOTES]
        return Result(name, "diverges", asked_for, reasons, divergence.module, asdict(comparison))

    def line(self) -> str:
        """One line, as soon as it is known."""
        return f"{self.name}: {self.verdict}" + (f": {self.reasons[0].splitlines()[0]}" if self.reasons else "")


LABELS = {"loss": "loss", "grad_norm": "gradient norm", "gradients": "gradients", "weights": "weights"}
SHOWN_NOTES = 3


@dataclass(frozen=True)
class ParityReport:
    """All cases of one comparison."""

    results: Sequence[Result]
    steps: int
    ranks: int
    precision: str
    layers: int | None = None

    @property
    def exit_code(self) -> ExitCode:
        """2 where a strategy that the user named cannot run here, else 1 where one diverges or crashes."""
        verdicts = {(result.verdict, result.asked_for) for result in self.results}
        if ("refused", True) in verdicts:
            return ExitCode.WRONG_REQUEST
        failed = any(verdict in ("diverges", "crashed") for verdict, _ in verdicts)
        return ExitCode.FAILED if failed else ExitCode.DONE

    def as_json(self) -> str:
        return json.dumps(
            {
                "equal": self.exit_code is ExitCode.DONE,
                "steps": self.steps,
                "ranks": self.ranks,
                "precision": self.precision,
                "layers": self.layers,
                "reference": "fp32, one process, dropout off",
                "cases": [asdict(result) for result in self.results],
            },
            ensure_ascii=False,
        )

    def print(self) -> None:
        """The table, and what is to say of the cases that are not equal."""
        shrunk = f", at most {self.layers} layers" if self.layers else ""
        which = "" if self.precision == "fp32" else " (compared: the first and the last)"
        title = (
            f"{self.steps} steps{which} on {self.ranks} process{'es' * (self.ranks > 1)} in {self.precision}, "
            f"against one process in fp32 (dropout off{shrunk}): largest relative differences/tolerances"
        )
        rows = [self._row(result) for result in self.results]
        print_table(title, ["strategy", *LABELS.values(), "worst parameter", "verdict"], rows)
        for result in self.results:
            for number, reason in enumerate(result.reasons):
                print(f"\n{result.name}: {reason}" if number == 0 else f"  {reason}", flush=True)
        shares = [result.comparison["left_out"] for result in self.results if result.comparison]
        if shares and max(shares) > 0:
            print(
                f"\nWeights: at most {max(shares):.2%} of the entries are left out: rounding decides their gradients, "
                "and so their updates.",
                flush=True,
            )

    def _row(self, result: Result) -> list[str]:
        found = result.comparison
        if found is None:
            return [result.name, *[""] * (len(LABELS) + 1), result.verdict]
        worst = max(("gradients", "weights"), key=lambda name: found[name]["value"] / found[name]["limit"])
        numbers = [f"{found[name]['value']:.1e}/{found[name]['limit']:.0e}" for name in LABELS]
        return [result.name, *numbers, found[worst]["where"] if found[worst]["value"] else "", result.verdict]
