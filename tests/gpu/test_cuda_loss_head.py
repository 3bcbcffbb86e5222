"""The loss computed in the head on a CUDA device: exact, without waiting for the device, and by liger-kernel."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drawbar.models.loss_head import LogitOps, liger_cross_entropy
from drawbar.parallel.chunked_loss import chunked_cross_entropy
from drawbar.parallel.precision import autocast

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device=CUDA, requires_grad=True)
    weight = torch.randn(5000, 64, device=CUDA, requires_grad=True)
    return hidden, weight, torch.randint(5000, (300,), device=CUDA)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return chunked_cross_entropy(hidden, weight, None, labels, chunk=70)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    pytest.importorskip("liger_kernel")
    return liger_cross_entropy(LogitOps([]))(hidden, weight, None, labels)


@pytest.mark.parametrize("way", [chunked, liger])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_loss_and_gradients_are_those_of_all_logits(precision: str, way: object) -> None:
    if way is liger and precision == "fp16":
        pytest.skip("a rule refuses it")
    hidden, weight, labels = tensors()
    exact = torch.autograd.grad(plain(hidden, weight, labels), [hidden, weight])
    found = []
    for compute in (plain, way):
        with autocast(precision, CUDA):
            loss = compute(hidden, weight, labels)
        scale = 2.0**10 if precision == "fp16" else 1.0
        gradients = torch.autograd.grad(loss * scale, [hidden, weight])
        found.append((loss.detach(), [gradient / scale for gradient in gradients]))
    (wanted, theirs), (loss, ours) = found
    torch.testing.assert_close(loss, wanted, rtol=1e-4 if precision != "fp32" else 1e-5, atol=0)
    for one, other, goal in zip(ours, theirs, exact, strict=True):
        assert (one - goal).norm() <= 1.5 * (other - goal).norm() + 1e-4 * goal.norm()


def test_the_host_does_not_wait_for_the_device() -> None:
    hidden, weight, labels = tensors()
    chunked(hidden, weight, labels).backward()  # what libraries set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        (chunked(hidden, weight, labels) / 300).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
