"""Imports without the garbage collector."""

import gc

import pytest

from drawbar.util.torch_imports import quick_imports


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_meanwhile_and_then_as_before(was_on: bool) -> None:
    if not was_on:
        gc.disable()
    try:
        frozen = gc.get_freeze_count()
        with quick_imports():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() is was_on
        assert gc.get_freeze_count() >= frozen + len(made)
    finally:
        gc.enable()


def test_an_import_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
