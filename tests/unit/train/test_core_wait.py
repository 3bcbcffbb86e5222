"""A run says so, once, when its threads have to wait for their cores."""

import pytest
import torch

from drawbar.train import core_wait
from runs import Fit


@pytest.mark.parametrize(("share", "told"), [(0.6, 1), (0.1, 0)])
def test_a_run_says_once_that_its_threads_wait(
    share: float, told: int, fit: Fit, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_wait, "SECONDS", 0.0)
    monkeypatch.setattr(core_wait.CoreWait, "share", lambda self: share)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    fit()
    assert capfd.readouterr().err.count("waited for a core for 60%") == told
