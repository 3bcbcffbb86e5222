"""Precision: what each setting means on each kind of hardware."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from drawbar.deepspeed.parts import DeepSpeedUpdater
from drawbar.errors import UserError
from drawbar.parallel.precision import LossScaler, autocast, choose_precision

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


def test_auto_on_a_cpu_is_fp32_whatever_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": True, "bf16": True})
    assert choose_precision("auto", CPU) == "fp32"
    assert choose_precision("bf16", CPU) == "bf16"


@pytest.mark.parametrize(("supported", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_asks_the_gpu(supported: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return supported or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert choose_precision("auto", CUDA) == expected
    if supported:
        assert choose_precision("bf16", CUDA) == "bf16"
    else:
        with pytest.raises(UserError, match=r"no bf16[\s\S]*precision=fp16"):
            choose_precision("bf16", CUDA)


def test_auto_on_mps_is_fp32() -> None:
    assert choose_precision("auto", MPS) == "fp32"


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are those of x86 libraries")
def test_auto_is_fp32_where_libraries_are_told_that_the_processor_has_avx2_alone() -> None:
    program = (
        "import torch; from drawbar.parallel.precision import choose_dtypes as choose; from drawbar import RunConfig;"
        "chosen = choose(RunConfig(), torch.device('cpu')); print(chosen.precision, chosen.optim.muon_precision)"
    )
    avx2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    found = subprocess.run([sys.executable, "-c", program], env=os.environ | avx2, capture_output=True, text=True)
    assert found.stdout.split() == ["fp32", "fp32"], found.stderr


@pytest.mark.parametrize("wanted", ["fp32", "bf16", "fp16"])
def test_a_format_asked_for_is_kept(wanted: str) -> None:
    assert choose_precision(wanted, CPU) == wanted


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_run_in_the_format(precision: str, dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(4, 4)
    with autocast(precision, CPU):
        assert linear(torch.ones(2, 4)).dtype == dtype
    assert linear(torch.ones(2, 4)).dtype == torch.float32
    assert linear.weight.dtype == torch.float32


def test_only_fp16_scales_the_loss() -> None:
    assert LossScaler("fp16").scale > 1
    for precision in ("fp32", "bf16"):
        scaler = LossScaler(precision)
        scaler.update(overflowed=True)
        assert scaler.scale == 1
        assert scaler.state_dict() == {}


def test_the_scale_halves_at_an_overflow_and_doubles_after_two_thousand_steps_without() -> None:
    scaler = LossScaler("fp16")
    start = scaler.scale
    for _ in range(1999):
        scaler.update(overflowed=False)
    assert scaler.scale == start
    resumed = LossScaler("fp16")
    resumed.load_state_dict(scaler.state_dict())
    for each in (scaler, resumed):
        each.update(overflowed=False)
        assert each.scale == 2 * start
        each.update(overflowed=True)
        assert each.scale == start
        each.update(overflowed=False)
        assert each.scale == start


@pytest.mark.parametrize("steps", [1, 2000, 2001, 4000, 4001, 5300])
def test_the_scale_of_deepspeed_goes_on_in_both(steps: int) -> None:
    """It doubles at each two thousandth step, from the one after: a long quiet run is told from a short one by that."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def updater_of(scaler: DynamicLossScaler) -> DeepSpeedUpdater:
        updater = object.__new__(DeepSpeedUpdater)
        updater.precision, updater.ds_engine = "fp16", SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
        return updater

    options = {"init_scale": 4.0, "scale_window": 2000, "min_scale": 1.0, "delayed_shift": 1}
    options |= {"consecutive_hysteresis": False}
    scaler, resumed, native = DynamicLossScaler(**options), DynamicLossScaler(**options), LossScaler("fp16")
    for _ in range(steps):
        scaler.update_scale(overflow=False)
    state = updater_of(scaler).scaler_state()
    updater_of(resumed).load_scaler_state(state)
    native.load_state_dict(state)
    for _ in range(2500):
        scaler.update_scale(overflow=False)
        resumed.update_scale(overflow=False)
        native.update(overflowed=False)
        assert resumed.cur_scale == scaler.cur_scale
    assert native.scale in (scaler.cur_scale, scaler.cur_scale * 2)  # it grows a step earlier
    assert native.scale > state["scale"]
