"""What a user learns whose DeepSpeed is missing or broken."""

import sys
from pathlib import Path

import pytest

from drawbar.errors import UserError
from drawbar.parallel.zero import import_deepspeed
from tiny import CPU


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No DeepSpeed has been imported yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)


def test_missing(without: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match="not installed") as error:
        import_deepspeed(CPU)
    assert "pip install --no-build-isolation 'drawbar[deepspeed]'" in error.value.remedy
    assert "parallel.strategy=fsdp" in error.value.remedy


@pytest.mark.parametrize(
    "first_line",
    ["import a_package_that_is_not_there", "raise OSError('undefined symbol: _ZN3c105ErrorC2E')", "torch.no_such"],
)
def test_broken(without: None, first_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after torch was replaced by another version."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text(f"import torch\n{first_line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="cannot be imported beside torch") as error:
        import_deepspeed(CPU)
    assert "--force-reinstall" in error.value.remedy
