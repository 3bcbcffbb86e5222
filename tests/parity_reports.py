"""What ``drawbar parity`` might say, made by hand: one strategy of each verdict, with every text that is given."""

from dataclasses import asdict

from drawbar.parity.comparison import Comparison, Fault, Worst
from drawbar.parity.divergence import ComparedModule, Diagnosis
from drawbar.parity.result import ParityReport, Result

STEPS = 4
INFINITE = float("inf")


def comparison(scale: float = 1e-3, where: str = "model.norm.weight") -> Comparison:
    """The largest differences, as a share of their limits."""
    worst = {kind: Worst(scale * limit, limit, where) for kind, limit in {"loss": 1e-5, "grad_norm": 1e-4}.items()}
    worst |= {kind: Worst(scale * 1e-4, 1e-4, f"{where}, step 1") for kind in ("gradients", "weights")}
    return Comparison(**worst, left_out=0.01, faults=[Fault("", where)])


def curves(apart: float) -> dict[str, dict[str, object]]:
    steps = list(range(1, STEPS + 1))
    expected = [4.0 - 0.5 * step for step in steps]
    curve = {
        "steps": steps,
        "reference": expected,
        "found": [value * (1 + apart) for value in expected],
        "difference": [0.0, *[apart] * (STEPS - 1)],
        "limit": 1e-5,
    }
    return {"loss": curve, "grad_norm": curve}


def parity_report(text: str = "model.layers.1.mlp") -> ParityReport:
    """Equal, diverging, refused, crashed; ``text`` is the name of whatever may have any name."""
    wrong = Worst(INFINITE, 1e-4, text)
    right = Worst(1e-7, 1e-4, "rank 0")
    modules = [ComparedModule(f"model.layers.{number}", right, right, right, right) for number in range(20)]
    modules += [ComparedModule(text, right, wrong, None, wrong), ComparedModule("lm_head", wrong, wrong, right, wrong)]
    equal = Result("ddp", "equal", comparison=asdict(comparison(where=text)), curves=curves(1e-8))
    other = comparison(1e3, text)
    diverging = Result(f"fsdp {text}", "equal", comparison=asdict(other), curves=curves(INFINITE))
    diverging = diverging.diverging(other, Diagnosis(text, f"outputs diverge first at {text}"), modules)
    refused = Result("zero1 tensor=2", "refused", True, [f"{text} cannot be\n  remedy: {text}"])
    crashed = Result("single", "crashed", True, [f"in {text}: RuntimeError: {text}"])
    return ParityReport([equal, diverging, refused, crashed], STEPS, 2, "fp32", 3, text, text)
