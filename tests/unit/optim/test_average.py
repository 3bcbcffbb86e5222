"""The moving average of the weights: torch's own is the reference; what is evaluated, opened and exported is it."""

from contextlib import chdir
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import drawbar
from drawbar.commands.export_run import export_run
from drawbar.config.schema.run_config import OptimSection
from drawbar.optim.average import WeightAverage
from drawbar.optim.optimizers import build_optimizers
from drawbar.train.checkpoint_export import ExportFormat
from runs import Fit, scores, weights


def test_it_is_torchs_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizers = build_optimizers(model, OptimSection(name="sgd", lr=0.1, ema=0.9))
    for seed in range(5):
        model(torch.full((2, 3), float(seed))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        reference.update_parameters(model)
    average = optimizers[-1]
    assert isinstance(average, WeightAverage)
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    with average.in_place_of_weights():
        for ours, theirs in zip(model.parameters(), reference.module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
            assert ours is model[0].bias or not torch.equal(ours, trained[0])
    assert all(map(torch.equal, model.parameters(), trained))


def test_it_is_what_a_run_evaluates_and_what_is_opened_and_exported(fit: Fit, project: Path, run: Path) -> None:
    fit("optim.ema=0.8", "train.steps=6", "eval.every=3", "checkpoint.every=3")
    trained = weights(run, 6)
    saved = load_file(run / "checkpoints" / "step-00000006" / "optimizer-00000.safetensors")
    averages = {name: saved[f"{name}/ema"] for name in trained}
    assert not any(torch.equal(averages[name], trained[name]) for name in trained)
    with chdir(project):
        opened = drawbar.load_run(run, checkpoint="latest")
        assert opened.evaluate()["loss"] == pytest.approx(scores(run)[6]["eval/validation/loss"], rel=1e-6)
    assert all(torch.equal(averages[name], weight) for name, weight in opened.model.named_parameters())
    export_run(opened.config, None, project / "exported", "latest", ExportFormat())
    exported = load_file(project / "exported" / "model.safetensors")
    assert all(torch.equal(averages[name], weight) for name, weight in exported.items())
