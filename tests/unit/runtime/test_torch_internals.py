"""All names of torch that are not public are in the torch that runs these tests; a failure says which is gone."""

import re
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name

import pytest

from drawbar.errors import UserError
from drawbar.runtime import torch_internals
from drawbar.runtime.torch_internals import NAMES

PRIVATE = re.compile(
    r"^\s*(from torch[\w.]*\._|from torch[\w.]* import (.*\W)?_|import torch[\w.]*\._)"
    r"|\b(torch|distributed_c10d)\._[a-z]"
)
SOURCES = Path(torch_internals.__file__).parents[1]
MEMBERS = (
    "torch.cuda:_is_in_bad_fork",
    "torch.distributed.device_mesh:DeviceMesh._concatenate",
    "torch.distributed.device_mesh:DeviceMesh._flatten",
    "torch.distributed.device_mesh:DeviceMesh._unflatten",
    "torch.distributed.distributed_c10d:_world.pg_map",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler:Popen",
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch.distributed.tensor.parallel:ColwiseParallel._prepare_output_fn",
    "torch.distributed.tensor.parallel:ParallelStyle._apply",
    "torch.nn.attention.varlen:torch.ops.torch_attn._varlen_attn.default",
    "torch:ops.aten._local_scalar_dense.default",
    "torch:ops.aten._scaled_dot_product_cudnn_attention.default",
    "torch:ops.aten._scaled_dot_product_efficient_attention.default",
    "torch:ops.aten._scaled_dot_product_flash_attention.default",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
)
"""Members of torch's modules and classes that drawbar replaces, overrides, or asks for by name."""


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_the_name(name: str) -> None:
    assert getattr(torch_internals, name) is not None


@pytest.mark.parametrize("member", MEMBERS)
def test_this_torch_has_the_member(member: str) -> None:
    assert resolve_name(member) is not None


def test_a_name_that_a_new_torch_took_away_is_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "_gone", ("torch.distributed", "a test"))
    with pytest.raises(UserError) as error:
        torch_internals._gone  # noqa: B018
    assert f"torch {version('torch')} has no torch.distributed._gone" in error.value.what
    assert "2.11.0" in error.value.remedy
    with pytest.raises(AttributeError):
        torch_internals.unknown  # noqa: B018


def test_no_other_module_imports_what_is_not_public() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{number}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        if path != Path(torch_internals.__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if PRIVATE.search(line)
    ]
    assert found == []
