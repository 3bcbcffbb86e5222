"""Files by which a comparison goes on after a crash: a case that crashes ends its processes, and those started next
find the reference and the results so far."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from drawbar.parity.cases import Case
from drawbar.parity.comparison import KINDS, Fault, Limits, Reference, Tolerances, Trace
from drawbar.parity.result import Result

_REFERENCE = "reference.json"
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
        trace = reference.trace
        save_file(_untied(trace.weights, trace.ties), self.path / "weights.safetensors")
        for step, gradients in trace.gradients.items():
            save_file(gradients, self.path / f"gradients-{step}.safetensors")
        numbers = {"losses": list(trace.losses.items()), "grad_norms": list(trace.grad_norms.items())}
        values = {**vars(trace), **numbers, "weights": None, "gradients": list(trace.gradients)}
        values["unequal"] = [asdict(note) for note in trace.unequal]
        whole = {"trace": values, "tolerances": asdict(reference.tolerances)}
        (self.path / _REFERENCE).write_text(json.dumps(whole), encoding="utf-8")

    def reference(self) -> Reference:
        whole = json.loads((self.path / _REFERENCE).read_text("utf-8"))
        values, tolerances = whole["trace"], whole["tolerances"]
        weights = load_file(self.path / "weights.safetensors")
        for names in values["ties"]:
            weights |= dict.fromkeys(names, weights[names[0]])
        values["weights"] = weights
        values["gradients"] = {
            step: load_file(self.path / f"gradients-{step}.safetensors") for step in values["gradients"]
        }
        values |= {name: dict(values[name]) for name in ("losses", "grad_norms")}
        values["unequal"] = [Fault(**note) for note in values["unequal"]]
        limits = {kind: Limits(**tolerances[kind]) for kind in KINDS}
        return Reference(Trace(**values), Tolerances(**limits, max_gradient_error=tolerances["max_gradient_error"]))

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


def _untied(tensors: dict[str, Tensor], ties: list[list[str]]) -> dict[str, Tensor]:
    """Each tied tensor once: a safetensors file cannot hold one tensor under two names."""
    left_out = {name for names in ties for name in names[1:]}
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}
