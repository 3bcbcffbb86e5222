"""configs/: every preset is planned, and fits the GPUs that its name says."""

import tempfile
from functools import cache
from pathlib import Path

import pytest

import drawbar
from drawbar.config.schema.run_config import RunConfig
from drawbar.plan.machine import Machine
from drawbar.plan.run_forecast import Forecaster, RunForecast
from drawbar.plan.step_recorder import ACTIVATIONS
from drawbar.tasks.task_registry import task_class
from exhaustive import some
from preset_models import CONFIGS, PRESETS, named, number_of_layers, write_stand_in

pytestmark = pytest.mark.exhaustive


@cache
def plan(preset: Path, layers: int, micro_batch: int | None = None) -> RunForecast:
    """The plan of a preset whose model has so many blocks, on the machine that the preset is for."""
    name = named(preset)
    machine = Machine(int(name.get("nodes", 1)), int(name["gpus"]), int(name["gb"]) * 10**9, "cuda", None, 0.4)
    with tempfile.TemporaryDirectory() as folder:
        settings = write_stand_in(drawbar.load_config(preset).config, Path(folder), layers)
        settings += [] if micro_batch is None else [f"train.micro_batch={micro_batch}"]
        config = drawbar.load_config(preset, [*settings, f"run.dir={folder}"]).config
        return Forecaster(config, task_class(config.task.type), machine, None).forecast(config, preset.stem)


def peak_of_all_layers(config: RunConfig, two: RunForecast, three: RunForecast) -> int:
    """The peak grows by the same bytes with each further block, as these are alike."""
    each = three.largest.peak.bytes - two.largest.peak.bytes
    return two.largest.peak.bytes + (number_of_layers(config) - 2) * each


@pytest.mark.parametrize("preset", some(PRESETS, 5), ids=lambda preset: preset.stem)
def test_a_preset_is_planned_and_fits(preset: Path) -> None:
    config = drawbar.load_config(preset).config
    two, three = (plan(preset, layers) for layers in (2, 3))
    peak, usable = peak_of_all_layers(config, two, three), two.machine.usable
    if peak > usable and config.train.micro_batch == "auto":  # the run itself would find smaller ones that fit
        two, three = (plan(preset, layers, micro_batch=1) for layers in (2, 3))
        peak = peak_of_all_layers(config, two, three)
    assert 0 < peak <= usable
    assert two.largest.rows == three.largest.rows
    assert 0 < two.largest.peak.by_kind[ACTIVATIONS] < three.largest.peak.by_kind[ACTIVATIONS]


def test_the_peak_is_a_multiple_of_the_blocks() -> None:
    peaks = [plan(CONFIGS / "pretrain_8b_8x80gb.yaml", layers).largest.peak.bytes for layers in (2, 3, 4)]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0]
    # docs/plan.md has the sum by hand
    assert peaks[0] + 30 * (peaks[1] - peaks[0]) == pytest.approx(50.45e9, rel=0.001)
