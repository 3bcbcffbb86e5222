"""Which way the loss is computed: in the head wherever that is known to be right, and only there."""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.engine import Engine
from drawbar.engines.loss_choice import choose_cross_entropy
from drawbar.errors import UserError
from drawbar.models.loss_head import LogitOps, LossHead, liger_cross_entropy
from drawbar.tasks.batch import Batch
from tiny import CPU, Numbers, random_batch, random_step, tiny_config, tiny_engine, tiny_task, unchecked_engine


def config_with(way: str, **sections: Any) -> RunConfig:
    config = tiny_config(**sections)
    return config.model_copy(update={"task": config.task.model_copy(update={"cross_entropy": way})})


class OwnLoss(Numbers):
    """Looks at logits."""

    def loss(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return super().loss(outputs, batch) + 0 * outputs.logits.sum()


class Odd(Numbers):
    """Has a model with a bias that only its forward knows."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_forward_hook(self.shift)
        return model

    @staticmethod
    def shift(module: nn.Module, args: Any, outputs: Any) -> Any:
        outputs.logits = outputs.logits.roll(1, -1)
        return outputs


def engine_of(task_type: type[Numbers], config: RunConfig) -> Engine:
    return unchecked_engine(task_type(config), config, Distributed(RankInfo(), CPU, timeout=60))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_is_compiled_where_the_blocks_are(compiled: bool) -> None:
    config = config_with("auto", parallel=ParallelSection(strategy="single", compile=compiled))
    engine = engine_of(Numbers, config)
    (head,) = (module for module in engine.module.modules() if isinstance(module, LossHead))
    assert isinstance(head.cross_entropy, partial)
    assert head.cross_entropy.keywords["compiled"] is compiled


def test_the_loss_is_the_same_either_way() -> None:
    plain, chunked = tiny_engine(config_with("plain")), tiny_engine(config_with("auto"))
    assert (plain.cross_entropy, chunked.cross_entropy) == ("plain", "chunked")
    for step in range(2):
        one, other = plain.train_step(random_step(plain, step)), chunked.train_step(random_step(chunked, step))
        assert float(other.loss) == pytest.approx(float(one.loss), rel=1e-6)
        assert float(other.grad_norm) == pytest.approx(float(one.grad_norm), rel=1e-5)
    batch = random_batch(plain.task, 3, seed=1)
    assert float(chunked.eval_step(batch).loss) == pytest.approx(float(plain.eval_step(batch).loss), rel=1e-6)


@pytest.mark.parametrize(("task_type", "reason"), [(OwnLoss, "OwnLoss defines"), (Odd, "LlamaForCausalLM does to its")])
def test_what_looks_at_logits_gets_them(task_type: type[Numbers], reason: str) -> None:
    engine = engine_of(task_type, config_with("auto"))
    assert engine.cross_entropy == "plain"
    engine.train_step(random_step(engine, 0))
    with pytest.raises(UserError, match=f"cannot be computed in the head: .*{reason}") as caught:
        engine_of(task_type, config_with("chunked"))
    assert caught.value.where == "task.cross_entropy"


def test_the_devices_of_one_process_get_logits() -> None:
    config = config_with("chunked", parallel=ParallelSection(strategy="dp"))
    with pytest.raises(UserError, match="splits batches by rows over its devices"):
        choose_cross_entropy(tiny_task(config), config, nn.Identity(), [])


LIGER = "liger_kernel.transformers.functional"


def test_liger_kernel_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LIGER, None)
    with pytest.raises(UserError, match="liger-kernel cannot be used") as caught:
        tiny_engine(config_with("liger"))
    assert "drawbar[liger]" in caught.value.remedy


def test_liger_kernel_gets_targets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a function of the same arguments: the kernels themselves need a GPU, see ``tests/gpu``."""

    def fused(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Any,
        *,
        reduction: str,
        accum_dtype: Any,
        label_smoothing: float,
        lse_square_scale: float,
    ) -> Tensor:
        assert label_smoothing == lse_square_scale == 0
        assert bool((labels >= 0).all())
        return functional.cross_entropy(functional.linear(hidden, weight, bias), labels, reduction=reduction)

    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, LIGER, SimpleNamespace(liger_fused_linear_cross_entropy=fused))
    engines = [tiny_engine(config_with(way)) for way in ("plain", "liger")]
    assert engines[1].cross_entropy == "liger"
    plain, liger = (engine.train_step(random_step(engine, 0)) for engine in engines)
    assert float(liger.loss) == pytest.approx(float(plain.loss), rel=1e-6)
    assert float(liger.grad_norm) == pytest.approx(float(plain.grad_norm), rel=1e-5)
    with pytest.raises(UserError, match="changes its logits after the head"):
        liger_cross_entropy(LogitOps([(torch.ops.aten.tanh.default, [...])]))
