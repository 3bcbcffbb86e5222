"""The result of each case, as a table and as JSON."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from drawbar.errors import ExitCode
from drawbar.parity.cases import Case
from drawbar.parity.comparison import Comparison, Distances, Reference, Trace
from drawbar.parity.divergence import ComparedModule, Diagnosis
from drawbar.tracking.table import print_table
from drawbar.util.strict_json import with_finite_numbers

CaseVerdict = Literal["equal", "diverges", "refused", "crashed"]
LABELS = {"loss": "loss", "grad_norm": "gradient norm", "gradients": "gradients", "weights": "weights"}
SHOWN_FAULTS = 3
STYLES = {"equal": "green", "diverges": "bold red", "refused": "yellow", "crashed": "bold red"}
NOT_COMPARED = "not compared"
"""Of weights, where the first gradients differ so far that no entry's update could be the same."""
COLUMNS = ("output", "gradient", "parameter_gradients", "weights")
"""What is compared of a module: see :class:`ComparedModule`."""
EQUAL_MODULES = 3
"""Rows of equal modules that are printed before the first one that differs."""
MODULES = 8
"""Rows that are printed from that one on."""


@dataclass(frozen=True)
class Result:
    """One case."""

    name: str
    verdict: CaseVerdict
    asked_for: bool = True
    """Whether the user named it: then a refusal is an error."""
    reasons: list[str] = field(default_factory=list)
    module: str = ""
    """The first module that diverges."""
    comparison: dict[str, Any] | None = None
    curves: dict[str, dict[str, Any]] | None = None
    """See ``curves_of``."""
    modules: list[dict[str, Any]] = field(default_factory=list)
    """Of a case that diverges: each :class:`ComparedModule`, in the order in which one process computes them."""

    def diverging(self, comparison: Comparison, diagnosis: Diagnosis, modules: Sequence[ComparedModule]) -> "Result":
        """The same case, which has proved to diverge."""
        reasons = [diagnosis.text]
        for kind, worst in comparison.exceeded().items():
            reasons.append(f"{LABELS[kind]}: {worst.value:.1e}, more than {worst.limit:.0e}, at {worst.where}")
        reasons += [fault.text for fault in comparison.faults if fault.text not in reasons][:SHOWN_FAULTS]
        rows = [asdict(module) for module in modules]
        return replace(self, verdict="diverges", reasons=reasons, module=diagnosis.module, modules=rows)

    def values(self) -> dict[str, Any]:
        """What the JSON says of it; of each module also its ``standing``."""
        modules = [{**module, "standing": standing(self, module)} for module in self.modules]
        return {**asdict(self), "modules": modules}

    def line(self) -> str:
        """One line, as soon as it is known."""
        return f"{self.name}: {self.verdict}" + (f": {self.reasons[0].splitlines()[0]}" if self.reasons else "")


def curves_of(trace: Trace, reference: Reference, found: Distances) -> dict[str, dict[str, Any]]:
    """Loss and gradient norm by step: of the strategy, of one process, and how far they are apart."""
    one = reference.trace
    values = {
        "loss": (trace.losses, one.losses, found.loss, reference.tolerances.loss),
        "grad_norm": (trace.grad_norms, one.grad_norms, found.grad_norm, reference.tolerances.grad_norm),
    }
    return {
        kind: {
            "steps": sorted(expected),
            "found": [own[step] for step in sorted(expected)],
            "reference": [expected[step] for step in sorted(expected)],
            "difference": [apart[f"step {step}"] for step in sorted(expected)],
            "limit": limits.base,
        }
        for kind, (own, expected, apart, limits) in values.items()
    }


@dataclass(frozen=True)
class ParityReport:
    """All cases of one comparison."""

    results: Sequence[Result]
    steps: int
    ranks: int
    precision: str
    layers: int | None = None
    run: str = ""
    """The name of the run that the configuration is for."""
    model: str = ""

    @property
    def exit_code(self) -> ExitCode:
        """2 where a strategy that the user named cannot run here, or none can; else 1 where one diverges or crashes."""
        verdicts = {(result.verdict, result.asked_for) for result in self.results}
        if ("refused", True) in verdicts or verdicts == {("refused", False)}:
            return ExitCode.WRONG_REQUEST
        failed = any(verdict in ("diverges", "crashed") for verdict, _ in verdicts)
        return ExitCode.FAILED if failed else ExitCode.DONE

    def as_json(self) -> str:
        return json.dumps(self.values(), ensure_ascii=False, allow_nan=False)

    def values(self) -> dict[str, Any]:
        """What the JSON says. Numbers that are not finite are texts, as in ``metrics.jsonl``."""
        return with_finite_numbers(
            {
                "equal": self.exit_code is ExitCode.DONE,
                "run": self.run,
                "model": self.model,
                "steps": self.steps,
                "ranks": self.ranks,
                "precision": self.precision,
                "layers": self.layers,
                "reference": "fp32, one process, dropout off",
                "labels": LABELS,
                "cases": [result.values() for result in self.results],
            }
        )

    def print(self) -> None:
        """The table, and remarks on the cases that are not equal."""
        shrunk = f", at most {self.layers} layers" if self.layers else ""
        which = "" if self.precision == "fp32" else " (compared: the first and the last)"
        title = (
            f"{self.steps} steps{which} on {self.ranks} process{'es' * (self.ranks > 1)} in {self.precision}, "
            f"against one process in fp32 (dropout off{shrunk}): largest relative differences/tolerances"
        )
        rows = [_row(result) for result in self.results]
        print_table(title, ["strategy", "verdict", *LABELS.values(), "worst parameter"], rows, left=2, styles=STYLES)
        for result in self.results:
            for number, reason in enumerate(result.reasons):
                print(f"\n{result.name}: {reason}" if number == 0 else f"  {reason}", flush=True)
            if result.modules:
                _print_modules(result)
        shares = [result.comparison["left_out"] for result in self.results if result.comparison]
        shares = [share for share in shares if share < 1]
        if shares and max(shares) > 0:
            print(
                f"\nWeights: at most {max(shares):.2%} of the entries are left out: rounding decides their gradients, "
                "and so their updates.",
                flush=True,
            )


def _row(result: Result) -> list[str]:
    found = result.comparison
    if found is None:
        return [result.name, result.verdict, *[""] * (len(LABELS) + 1)]
    worst = max(("gradients", "weights"), key=lambda name: found[name]["value"] / found[name]["limit"])
    numbers = [f"{found[name]['value']:.1e}/{found[name]['limit']:.0e}" for name in LABELS]
    if found["left_out"] == 1:
        numbers[list(LABELS).index("weights")] = NOT_COMPARED
    return [result.name, result.verdict, *numbers, found[worst]["where"] if found[worst]["value"] else ""]


def _print_modules(result: Result) -> None:
    """The modules around the first one that differs."""
    names = [module["name"] for module in result.modules]
    first = names.index(result.module) if result.module in names else 0
    start = max(0, first - EQUAL_MODULES)
    shown = result.modules[start : first + MODULES]
    rows = [
        [
            module["name"] or "(the model)",
            standing(result, module),
            *(_difference(module[kind]) for kind in COLUMNS),
        ]
        for module in shown
    ]
    print(flush=True)
    print_table(
        f"{result.name}: {len(shown)} of {len(names)} modules, in the order in which one process computes them "
        "(differences: of the output, of its gradient, of the parameters' gradients, of the last weights)",
        ["module", "", *COLUMNS],
        rows,
        left=2,
        styles={"first to differ": "bold red", "differs": "red"},
    )


def standing(result: Result, module: Mapping[str, Any]) -> str:
    """``first to differ``: the one to look at; ``differs``: in the step of few rows; ``follows``: only its last weights
    differ, as they do wherever anything did in the steps before; ``equal``."""
    of_step = any(_exceeds(module[kind]) for kind in COLUMNS[:-1])
    of_end = _exceeds(module[COLUMNS[-1]])
    if module["name"] == result.module and (result.module != "" or of_step or of_end):
        return "first to differ"
    return "differs" if of_step else "follows" if of_end else "equal"


def _exceeds(worst: Mapping[str, Any] | None) -> bool:
    return worst is not None and worst["value"] > worst["limit"]


def _difference(worst: Mapping[str, Any] | None) -> str:
    if worst is None:
        return ""
    return f"{worst['value']:.1e}" + (f" > {worst['limit']:.0e}" if _exceeds(worst) else "")


_REFERENCE = "reference.pt"
_RESULTS = "results.jsonl"
_CRASH = "crash.txt"


class ResultsDir:
    """The folder of one comparison: its reference, its results, and the text of the newest crash."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def has_reference(self) -> bool:
        return (self.path / _REFERENCE).exists()

    def save_reference(self, reference: Reference) -> None:
        torch.save(reference, self.path / _REFERENCE)

    def reference(self) -> Reference:
        # the folder is this command's own, and temporary: nobody else writes there
        found: Reference = torch.load(self.path / _REFERENCE, weights_only=False)
        return found

    def add(self, result: Result) -> None:
        with (self.path / _RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def results(self, cases: Sequence[Case]) -> list[Result]:
        """The results of these cases, in their order; nothing for those that have none."""
        found = self._results()
        return [found[case.name] for case in cases if case.name in found]

    def names(self) -> set[str]:
        """The cases that have a result."""
        return set(self._results())

    def _results(self) -> dict[str, Result]:
        path = self.path / _RESULTS
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        results = [Result(**json.loads(line)) for line in lines]
        return {result.name: result for result in results}

    def save_crash(self, text: str) -> None:
        """Keep the text of the first rank that crashes: the others fail because of it."""
        with suppress(FileExistsError), (self.path / _CRASH).open("x", encoding="utf-8") as file:
            file.write(text)

    def drop_crash(self) -> None:
        (self.path / _CRASH).unlink(missing_ok=True)

    def pop_crash(self) -> str:
        path = self.path / _CRASH
        if not path.exists():
            return "a process was killed"
        text = path.read_text("utf-8")
        path.unlink()
        return text
