"""What a user learns whose DeepSpeed is missing or broken."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from drawbar.deepspeed.state import import_deepspeed
from drawbar.errors import UserError
from tiny import CPU


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No DeepSpeed has been imported yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)


def test_it_takes_the_gpu_of_a_process_that_sees_no_other(without: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes by LOCAL_RANK, which is 3 for the fourth task of a node, whose GPU is yet its number 0."""
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setenv("LOCAL_RANK", "3")
    import_deepspeed(torch.device("cuda", 0))
    assert os.environ["LOCAL_RANK"] == "0"


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
