"""Compiled blocks: the same losses, compiled once for all blocks and all lengths; and machines that cannot compile."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from transformers import AutoConfig, AutoModelForCausalLM

from drawbar.errors import UserError
from drawbar.parallel.apply import checkpoint_activations
from drawbar.parallel.compile import check_compiler, compile_blocks
from drawbar.threads import usable_cores
from harness import run_ranks

LENGTHS = [12, 12, 17, 23, 9, 31]


@pytest.fixture(autouse=True)
def cache_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps what it has compiled; for another set of instructions (ATEN_CPU_CAPABILITY) that may be wrong."""
    name = f"drawbar-inductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / name))


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=99, **sizes)).train()


def train(model: torch.nn.Module) -> list[float]:
    """Losses of steps with rows of different lengths."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step, length in enumerate(LENGTHS):
        tokens = torch.randint(99, (2, length), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.exhaustive
def test_losses_are_equal_and_lengths_are_compiled_once() -> None:
    plain, model = build(), build()
    names = [name for name, _ in model.named_parameters()]
    checkpoint_activations(model, "selective")
    compile_blocks(model)
    assert [name for name, _ in model.named_parameters()] == names
    torch._dynamo.reset()
    counters.clear()
    assert train(model) == pytest.approx(train(plain), rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 2  # of three blocks: for the first length, then for any
    prompt = torch.tensor([[3, 4, 5]])
    texts = [each.eval().generate(prompt, max_new_tokens=4, do_sample=False) for each in (plain, model)]
    assert torch.equal(*texts)
    assert counters["stats"]["unique_graphs"] == 2  # generation is not compiled


def compile_without_compiler() -> str:
    with pytest.raises(UserError) as error:
        check_compiler(torch.device("cpu"), local_ranks=1)
    return str(error.value)


def test_a_machine_without_compiler_is_told_so(tmp_path) -> None:
    env = {"CXX": str(tmp_path / "none"), "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    (message,) = run_ranks(compile_without_compiler, 1, env=env)
    assert "torch.compile does not work on this machine" in message
    assert "parallel.compile=false" in message


def compiling_processes(ranks: int) -> int:
    check_compiler(torch.device("cpu"), ranks)
    return inductor.compile_threads


@pytest.mark.exhaustive
def test_ranks_share_the_cores_to_compile() -> None:
    shared = 2 * usable_cores()
    assert run_ranks(compiling_processes, 1, shared) == [1]
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "as it is"}  # for torch, which has read it by now
    assert run_ranks(compiling_processes, 1, shared, env=env) == run_ranks(compiling_processes, 1, 1)


def test_models_without_blocks_are_refused() -> None:
    with pytest.raises(UserError, match="Linear has no repeated blocks"):
        compile_blocks(torch.nn.Linear(2, 2))
