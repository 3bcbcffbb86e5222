"""Whether saves fit between the scheduler's signal and the time limit."""

from pathlib import Path

import pytest

from drawbar.distributed.interrupt import SIGNAL_SECONDS
from runs import Fit

WARNING = "Set cluster.signal_seconds to more than"


@pytest.mark.parametrize(("lead", "warnings"), [("1e-6", 1), ("1e6", 0), (None, 0)])
def test_a_save_that_takes_longer_than_the_lead_is_one_warning(
    lead: str | None, warnings: int, fit: Fit, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lead is None:
        monkeypatch.delenv(SIGNAL_SECONDS, raising=False)
    else:
        monkeypatch.setenv(SIGNAL_SECONDS, lead)
    fit()  # it saves several times
    log = (run / "logs" / "rank-0000.log").read_text()
    assert log.count(WARNING) == warnings
    assert log.count("signalled to save only 1e-06 s before its time limit") == warnings
