"""``drawbar convert``: all that a checkpoint has goes out bit by bit, also of models that are unlike others."""

from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

import drawbar
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.read import read_snapshot
from drawbar.convert.convert_run import convert_run
from drawbar.convert.dcp_folders import read_dcp
from drawbar.deepspeed.folders import read_deepspeed
from drawbar.tasks.batch import Batch

STEPS = ("train.steps=2", "optim.warmup=0", "eval.every=null", "optim.ema=0.9")


class Odd(nn.Module):
    """Has a parameter that never gets a gradient, names with slashes, and buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.scales = nn.ParameterDict({"a/b": torch.ones(8), "x y": torch.ones(8)})
        self.register_buffer("count", torch.tensor(2**24))  # from here on fp32 leaves out odd numbers
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("total", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        if self.training:
            self.count += 1 + self.count % 2  # stays odd
            self.phase += 1 + 2j
            self.total += 0.1
        hidden_BLD = self.embed(tokens_BL)
        for scale_D in self.scales.values():
            hidden_BLD = hidden_BLD * scale_D
        return F.layer_norm(hidden_BLD, (8,)) @ self.embed.weight.T


class OddTask(drawbar.Task):
    label_placement = "next_token"

    class Config(drawbar.TaskConfig):
        pass

    def build_model(self) -> nn.Module:
        return Odd()

    def encode(self, record: dict[str, Any], train: bool) -> dict[str, Any]:
        tokens = np.frombuffer(record["text"].encode()[:8].ljust(8), dtype=np.uint8).astype(np.int32)
        return {"input_ids": tokens, "labels": tokens}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["input_ids"])

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        labels = batch["labels"][:, 1:].long()
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")

    def num_targets(self, batch: Batch) -> int:
        return int(batch["labels"][:, 1:].numel())


def check_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [
        name for name in expected if found[name].dtype != expected[name].dtype or not found[name].equal(expected[name])
    ]


def test_a_state_goes_out_as_it_is(project: Path) -> None:
    values = yaml.safe_load((project / "config.yaml").read_text())
    del values["task"]
    (project / "config.yaml").write_text(yaml.safe_dump(values))
    with chdir(project):
        config = drawbar.load_config("config.yaml", STEPS, OddTask.Config).config
        drawbar.Trainer(config, OddTask).fit()
    saved = read_snapshot(CheckpointDirectory(project / "runs" / "tiny" / "checkpoints").resolve("2"))
    assert saved.model["count"] % 2 == 1
    assert "unused/exp_avg" not in saved.optimizer
    moments = {name: tensor for name, tensor in saved.optimizer.items() if not name.endswith("/ema")}
    assert 0 < len(moments) < len(saved.optimizer)  # an average is of no use to other programs
    with chdir(project):
        for form in ("dcp", "deepspeed"):
            convert_run(config, "latest", form, project / form)
    check_equal(
        read_dcp(project / "dcp"),
        {f"model.{name}": tensor for name, tensor in saved.model.items()}
        | {f"optimizer.state.{'.'.join(name.rsplit('/', 1))}": tensor for name, tensor in moments.items()},
    )
    check_equal(read_deepspeed(project / "deepspeed"), saved.model)
    zero = project / "deepspeed" / "universal" / "zero"
    for name, tensor in moments.items():
        found = torch.load(zero / f"{name}.pt", weights_only=True)
        assert tensor.equal(found if name.endswith("/step") else found["param"])
