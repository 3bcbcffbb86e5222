"""The benchmarks run; their figures are nobody's business here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from training import measure


def test_training_is_measured() -> None:
    found = measure("cpu", "fp32", rows=1, micro_batches=2, pairs=5)
    assert found["pairs"] == 5
    assert float(found["tokens_per_second"]) > 0
    assert float(found["ratio"]) > 0
