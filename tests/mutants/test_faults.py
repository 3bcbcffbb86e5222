"""Every planted fault can still be planted. ``run.py`` finds out which of them the tests notice."""

from pathlib import Path

import pytest

from faults import ROOT, SOURCE, Fault, Stale, all_faults

FAULTS = all_faults()
FEWEST = 80
"""Code that goes takes its faults along; new code needs others."""


def test_there_are_enough_under_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= FEWEST


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted(fault: Fault) -> None:
    assert fault.old != fault.new
    compile(fault.planted(SOURCE), fault.file, "exec")
    assert fault.tests
    for place in fault.tests:
        file, _, test = place.partition("::")
        assert (ROOT / file).exists(), place
        assert not test or f"def {test}(" in (ROOT / file).read_text("utf-8"), place


def test_a_fault_whose_text_has_moved_is_stale(tmp_path: Path) -> None:
    (tmp_path / "drawbar").mkdir()
    fault = Fault("an example", "module.py", "a = 1", "a = 2", [])
    for text in ("a = 3\n", "a = 1\na = 1\n"):
        (tmp_path / "drawbar" / "module.py").write_text(text)
        with pytest.raises(Stale):
            fault.planted(tmp_path)
