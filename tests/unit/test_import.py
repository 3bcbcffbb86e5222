"""The library's public face."""

import subprocess
import sys

import pytest

import drawbar


def test_import_is_light() -> None:
    script = "import sys, drawbar; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "drawbar" in modules
    assert not {"torch", "transformers", "numpy", "pydantic", "click"} & modules


@pytest.mark.parametrize("name", ["load_config", "RunConfig", "TaskConfig", "UserError", "main"])
def test_configuration_needs_no_torch(name: str) -> None:
    script = f"import sys, drawbar; drawbar.{name}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_public_name_is_there() -> None:
    assert set(drawbar.__all__) == set(drawbar._HOMES)
    for name in drawbar.__all__:
        found = getattr(drawbar, name)
        assert found.__name__ == name
        assert found.__module__ == drawbar._HOMES[name]
        assert found.__doc__


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = drawbar.Trainr
    namespace: dict[str, object] = {}
    exec("from drawbar import *", namespace)
    assert set(drawbar.__all__) <= set(namespace)
