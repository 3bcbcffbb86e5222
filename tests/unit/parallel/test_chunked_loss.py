"""The cross-entropy that is computed chunk by chunk: its value and its gradients are those of all logits at once."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from drawbar.parallel.chunked_loss import (
    PLAIN,
    SMALL_CHUNK,
    LossTargets,
    LossTerms,
    _compiled_kernels,
    chunked_cross_entropy,
    targets_in_chunk,
)
from drawbar.parallel.compile import uncompiled_blocks

HIDDEN, VOCABULARY, IGNORED, CHUNK = 6, 11, -100, 4
BOTH = LossTerms(label_smoothing=0.2, z_loss=0.01)


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, weight and bias, that want gradients; and labels, a third of them ignored."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCABULARY, (3, 5))
    labels[labels < VOCABULARY // 3] = IGNORED
    return hidden, weight, torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if bias else None, labels


def soft_cap(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 2) * 2


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    capped: bool = False,
    terms: LossTerms = PLAIN,
) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    logits = soft_cap(logits) if capped else logits
    wide, labels = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), labels.flatten()
    loss = functional.cross_entropy(
        wide, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=terms.label_smoothing
    )
    return loss + terms.z_loss * wide[labels != IGNORED].exp().sum(1).log().square().sum()


def chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    capped: bool = False,
    compiled: bool = False,
    terms: LossTerms = PLAIN,
) -> Tensor:
    targets = LossTargets.of(labels, IGNORED)
    cap = soft_cap if capped else None
    hidden_NH = hidden.flatten(0, 1)[targets.positions_N]
    return chunked_cross_entropy(
        hidden_NH, weight, bias, targets.labels_N, cap, chunk=CHUNK, compiled=compiled, terms=terms
    )


def gradients(loss: Tensor, *tensors: Tensor | None, scale: float = 0.3) -> list[Tensor]:
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return list(torch.autograd.grad(loss * scale, wanted))


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("terms", [PLAIN, LossTerms(label_smoothing=0.2), LossTerms(z_loss=0.01), BOTH])
def test_loss_and_gradients_are_those_of_the_plain_way(terms: LossTerms, bias: bool, capped: bool) -> None:
    *tensors, labels = inputs(bias=bias)
    expected, found = plain(*tensors, labels, capped, terms), chunked(*tensors, labels, capped, terms=terms)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, other in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_fp32_is_exact_within_rounding() -> None:
    *tensors, labels = inputs(torch.float32)
    torch.testing.assert_close(chunked(*tensors, labels), plain(*tensors, labels), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_no_less_exact_than_the_plain_way(dtype: torch.dtype) -> None:
    *tensors, labels = inputs(torch.float32)
    exact = plain(*tensors, labels)
    with torch.autocast("cpu", dtype=dtype):
        expected, found = plain(*tensors, labels), chunked(*tensors, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)  # of the same logits, in the same format
    true = gradients(exact, *tensors)
    for one, other, goal in zip(gradients(found, *tensors), gradients(expected, *tensors), true, strict=True):
        assert one.dtype == torch.float32
        assert (one - goal).norm() <= 1.5 * (other - goal).norm()


def test_fp16_gradients_are_scaled_before_they_are_rounded() -> None:
    """As in the plain way: an unscaled one of 1e-9 would be nothing."""
    *tensors, labels = inputs(torch.float32, bias=False)
    with torch.no_grad():
        tensors[1][:] = 0
        tensors[1][int(labels.max())] = -1  # a token of little probability, if the hidden states are large
        tensors[0][:] = 3.5
    with torch.autocast("cpu", dtype=torch.float16):
        found = chunked(*tensors, labels.clamp(max=int(labels.max()) - 1))
    (_, of_weight) = gradients(found, *tensors, scale=2.0**16)
    assert float(of_weight[int(labels.max())].norm()) > 0


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, _, labels = inputs(bias=False)
    weight.requires_grad_(False)
    found = chunked(hidden, weight, None, labels)
    found.backward()
    assert weight.grad is None
    (expected,) = gradients(plain(hidden, weight, None, labels), hidden, scale=1)
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-12, atol=1e-12)


def test_without_targets_the_loss_is_zero_and_so_are_the_gradients() -> None:
    *tensors, labels = inputs()
    found = chunked(*tensors, torch.full_like(labels, IGNORED))
    assert found.item() == 0
    assert all(not gradient.any() for gradient in gradients(found, *tensors))


def test_without_gradients_nothing_is_kept() -> None:
    *tensors, labels = inputs()
    with torch.no_grad():
        found = chunked(*tensors, labels, terms=BOTH)  # which are for training alone
    assert not found.requires_grad
    torch.testing.assert_close(found, plain(*tensors, labels).detach(), rtol=1e-12, atol=0)


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {one.shape for one in (out if isinstance(out, tuple) else (out,)) if isinstance(one, Tensor)}
        return out


def test_there_are_never_logits_of_more_than_a_chunk() -> None:
    *tensors, labels = inputs()
    with Shapes() as shapes:
        gradients(chunked(*tensors, labels), *tensors)
    with_logits = {shape[0] for shape in shapes.seen if shape[1:] == (VOCABULARY,)}
    assert max(with_logits - {HIDDEN}) == CHUNK < int((labels != IGNORED).sum())  # the weight, transposed, has HIDDEN


@pytest.fixture
def compiles() -> None:
    """No kernels of other tests, and no limit of variants that they have used up."""
    torch.compiler.reset()
    _compiled_kernels.cache_clear()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("terms", [PLAIN, BOTH])
def test_compiled_it_is_the_same_within_rounding(terms: LossTerms, capped: bool) -> None:
    *tensors, labels = inputs(torch.float32)
    for precise in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not precise):
            expected, found = (chunked(*tensors, labels, capped, compiled, terms) for compiled in (False, True))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        for one, other in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
            # an eighth of bf16's last bit: some elements are rounded to the other neighbor
            assert (one - other).norm() <= (1e-6 if precise else 2**-10) * other.norm()
    with uncompiled_blocks():
        assert torch.equal(chunked(*tensors, labels, capped, True), chunked(*tensors, labels, capped))


class Passes(TorchDispatchMode):
    """Counts the operators that read or write logits. Leaves compiled code as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        logits = [one for one in (*args, out) if isinstance(one, Tensor) and one.shape == (CHUNK, VOCABULARY)]
        if logits and not func.is_view and "empty" not in func._schema.name:
            self.found.append(func._schema.name)
        return out


@pytest.mark.exhaustive
@pytest.mark.usefixtures("compiles")
def test_compiled_logits_are_touched_by_two_kernels_besides_the_products() -> None:
    *tensors, labels = inputs(torch.float32)
    labels = labels.clamp(min=0)  # 15 targets: three full chunks
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunked(*tensors, labels, compiled=True)
        with Passes() as passes:
            chunked(*tensors, labels, compiled=True)
    # the logits; the gradients of hidden states and bias (that of the weight takes a view)
    assert Counter(passes.found) == {"aten::addmm": 3, "aten::mm": 3, "aten::sum": 3}
    logits, label = torch.zeros(CHUNK, VOCABULARY, dtype=torch.bfloat16), torch.zeros(CHUNK, 1, dtype=torch.long)
    sums, codes = run_and_get_code(_compiled_kernels()[0], logits, label, None, False)
    _, more = run_and_get_code(_compiled_kernels()[1], logits, sums[0], label, None, None, PLAIN, 0.0)
    for code in (*codes, *more):
        assert code.count("async_compile.cpp_pybinding") == 1
        assert f"({CHUNK}, {VOCABULARY})" not in "".join(
            line for line in code.splitlines() if "= empty_strided" in line
        )


def test_a_chunk_is_bounded_by_bytes_and_by_the_gradient_of_the_weight() -> None:
    assert targets_in_chunk(128 * 1024, 512) * 128 * 1024 * 4 == SMALL_CHUNK
    assert targets_in_chunk(128 * 1024, 8192) == 4096  # half of what the fp32 gradient of the weight takes
    assert targets_in_chunk(2**40, 1) == 1
