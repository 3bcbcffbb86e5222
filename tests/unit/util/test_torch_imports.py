"""What torchao logs of itself when transformers imports it is left out; all else that these loggers say stays."""

import logging
import subprocess
import sys
from enum import Enum

import pytest
import torch

from programs import need_library

NO_LIBRARY = "Failed to load /torchao/_C_cutlass_90a.abi3.so: Could not load this library"
OLD_ENUM = "%s is an Enum subclass and is now natively supported by torch.compile as an opaque value type"


@pytest.mark.exhaustive
def test_importing_the_trainer_says_nothing() -> None:
    need_library("torchao", "fp8")
    script = "import sys, drawbar.train.trainer; print('torchao' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert "torchao" not in done.stderr
    assert "KernelPreference" not in done.stderr


@pytest.mark.parametrize(("cuda", "heard"), [(None, []), ("13.0", [NO_LIBRARY])])
def test_a_library_for_gpus_that_is_missing(
    cuda: str | None, heard: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    logging.getLogger("torchao").warning(NO_LIBRARY)
    assert caplog.messages == heard


def test_other_warnings_of_torchao_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("torchao").warning("the scale is not finite")
    logging.getLogger("torch.utils._pytree").warning("something else")
    assert caplog.messages == ["the scale is not finite", "something else"]


def test_an_enum_in_the_old_way(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch.utils._pytree")
    theirs, own = (
        Enum(name, ["A"], module=home) for name, home in (("Theirs", "torchao.quantization"), ("Own", "mine"))
    )
    logger.warning(OLD_ENUM, theirs)
    logger.warning(OLD_ENUM, own)
    assert [message.partition(" is ")[0] for message in caplog.messages] == ["<enum 'Own'>"]
