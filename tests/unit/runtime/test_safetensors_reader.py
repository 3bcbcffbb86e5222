"""Tensors in files are read in parts, in little memory; models are made without their parameters."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

from drawbar.runtime import safetensors_reader
from drawbar.runtime.safetensors_reader import STORED_DTYPES, TensorFiles, parameters_on_meta, read_slice, shape_of
from harness import run_ranks
from memory import memory

MIB = 2**20


def open_files() -> set[str]:
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the one of listdir itself
            continue
    return names


def test_every_type_and_shape_reads_as_it_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = {
        f"{name} {shape}": torch.randint(0, 2, shape).to(dtype)
        for name, dtype in STORED_DTYPES.items()
        for shape in ((), (0, 3), (5,), (2, 3, 4))
    }
    expected["strange"] = torch.tensor([float("nan"), -0.0, float("inf")])
    save_file(expected, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found = TensorFiles([tmp_path / "a.safetensors"])
    assert found.metadata == {"format": "pt"}
    assert found.keys() == expected.keys()
    assert len(found) == len(expected)
    for name, tensor in found.items():
        assert tensor.dtype == found.dtype(name) == expected[name].dtype
        assert tensor.shape == found.shape(name) == shape_of(found, name) == shape_of(expected, name)
        assert tensor.view(-1).view(torch.uint8).equal(expected[name].view(-1).view(torch.uint8)), name
    assert "another" not in found
    with pytest.raises(KeyError):
        found["another"]


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[int], tuple[slice, ...]]:
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return shape, tuple(slice(*bound) for bound in bounds)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts(), st.sampled_from([1, 30, 100, 10**6]))
def test_a_part_is_that_part_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[list[int], tuple[slice, ...]], piece: int
) -> None:
    shape, index = case
    monkeypatch.setattr(safetensors_reader, "_PIECE", piece)  # so that tiny tensors are read in many pieces
    whole = torch.randn(shape)
    save_file({"before": torch.randn(3), "w": whole}, tmp_path / "a.safetensors")
    files = TensorFiles([tmp_path / "a.safetensors"])
    assert read_slice(files, "w", index).equal(whole[index])
    assert read_slice({"w": whole}, "w", index).equal(whole[index])


def test_several_files_and_other_names(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors", metadata={"one": "1"})
    save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors", metadata={"two": "2"})
    both = TensorFiles([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
    assert sorted(both) == ["a", "b"]
    assert both.metadata == {"one": "1", "two": "2"}
    renamed = both.renamed({"x.a": "a", "x.tied": "a"})
    assert sorted(renamed) == ["x.a", "x.tied"]
    assert renamed["x.tied"].equal(torch.ones(2))
    assert "a" not in renamed
    save_file({"a": torch.full((2,), 7.0)}, tmp_path / "3.safetensors")
    assert TensorFiles([tmp_path / "1.safetensors", tmp_path / "3.safetensors"])["a"].tolist() == [7, 7]


def test_a_file_may_be_deleted_while_it_is_open_and_is_closed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(9)}, path)
    view = TensorFiles([path]).renamed({"b": "a"}).renamed({"c": "b"})
    assert str(path) in open_files()
    path.unlink()
    assert view["c"].equal(torch.arange(9))
    del view
    assert not any(name.startswith(str(path)) for name in open_files())


@pytest.mark.parametrize("cut", [4, 20, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(9)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"a\.safetensors (is not a safetensors file|has \d+ bytes instead of \d+)"):
        TensorFiles([path])
    assert str(path) not in open_files()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for text in (b"", b"\x02\0\0\0\0\0\0\0[]", b"\x09\0\0\0\0\0\0\0" + b'{"a": {}}', b"some text, and quite long"):
        path.write_bytes(text)
        with pytest.raises(ValueError, match="is not a safetensors file"):
            TensorFiles([path])


def rise_while_reading(path: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that are returned by each way to read, and how far the memory of this process rises at its highest."""
    files, sizes, rises = TensorFiles([Path(path)]), {}, {}

    def one(index: tuple[slice, ...]) -> int:
        return read_slice(files, "large", index).nbytes

    ways = {
        "rows": lambda: one((slice(0, 4096), slice(0, 1024))),
        "columns": lambda: one((slice(0, 32768), slice(128, 256))),
        "one after the other": lambda: max(tensor.nbytes for tensor in files.values()),
        "mapped": lambda: sum(tensor.sum().new_empty(tensor.shape).nbytes for tensor in load_file(path).values()),
    }
    one((slice(0, 4096), slice(0, 1024)))  # what is made once in a process
    for name, way in ways.items():
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
        before = memory("VmRSS")
        sizes[name] = way()
        rises[name] = memory("VmHWM") - before
    return sizes, rises


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process took")
def test_reading_a_part_takes_little_more_memory_than_the_part(tmp_path: Path) -> None:
    large = {"large": torch.zeros(32768, 1024), **{str(i): torch.zeros(1024, 1024) for i in range(8)}}
    save_file(large, tmp_path / "a.safetensors")
    ((sizes, rises),) = run_ranks(rise_while_reading, 1, str(tmp_path / "a.safetensors"))
    assert sizes["rows"] == sizes["columns"] == 16 * MIB
    assert 8 * MIB < rises["rows"] < 32 * MIB  # some of it is memory that the first reading gave back
    assert rises["columns"] < (16 + 16 + 16) * MIB  # allocators keep some; the whole tensor has 128
    assert sizes["one after the other"] == 128 * MIB
    assert rises["one after the other"] < (128 + 8) * MIB
    assert rises["mapped"] > 150 * MIB  # mapped files do count: that is why they are not


class Tied(nn.Module):
    """Every way to have a parameter, in two places where possible."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        shared = nn.Parameter(torch.ones(4))
        self.scale = shared
        self.norm = nn.LayerNorm(4, bias=False)
        self.norm.weight = shared
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.listed = nn.ParameterList([torch.ones(2)])
        self.register_parameter("none", None)
        self.register_buffer("steps", torch.arange(5.0))
        self.register_buffer("hidden", torch.full((2,), 3.0), persistent=False)


def test_parameters_are_on_meta_and_tied_and_buffers_are_as_ever() -> None:
    real = Tied()
    with parameters_on_meta():
        model = Tied()
        model.load_state_dict(real.state_dict())  # has no effect on parameters, and says nothing
    assert nn.Linear(1, 1).weight.device.type == "cpu"
    found, expected = dict(model.named_parameters()), dict(real.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.is_meta, name
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.shape, parameter.dtype) == (expected[name].shape, expected[name].dtype)
        assert parameter.requires_grad == expected[name].requires_grad
    assert model.head.weight is model.embed.weight
    assert model.norm.weight is model.scale
    assert model.steps.equal(torch.arange(5.0))
    assert model.hidden.equal(torch.full((2,), 3.0))


def test_the_end_of_the_context_is_felt_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), parameters_on_meta():
        1 / 0  # noqa: B018
    assert not nn.Linear(1, 1).weight.is_meta


def test_adapters_are_on_meta_too() -> None:
    with parameters_on_meta():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"]), model)
    names = [name for name, _ in model.named_parameters()]
    assert any("lora_A" in name for name in names)
    assert any("modules_to_save" in name for name in names)
    assert all(parameter.is_meta for parameter in model.parameters())
