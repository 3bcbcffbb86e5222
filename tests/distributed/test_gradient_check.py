"""Before training every strategy finds out whether a user's loss has a gradient; one that has trains as it would."""

from pathlib import Path

import pytest

from drawbar.errors import ExitCode
from harness import run_cli
from runs import largest_difference, losses

MODULE = """
import drawbar

class Own(drawbar.CausalLM):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch)

class Detached(drawbar.CausalLM):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch).detach()
"""
STRATEGIES = {
    "ddp": ("parallel.strategy=ddp",),
    "zero1": ("parallel.strategy=zero1",),
    "fsdp": ("parallel.strategy=fsdp",),
    "fsdp, gathered once": ("parallel.strategy=fsdp", "parallel.reshard=false"),
    "tensor": ("parallel.tensor=2",),
    "pipeline": ("parallel.pipeline=2",),
    "deepspeed": ("parallel.strategy=deepspeed", "parallel.zero_stage=3"),
    "deepspeed pipeline": ("parallel.strategy=deepspeed", "parallel.pipeline=2"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loss_of_ones_own_trains_as_drawbars(name: str, project: Path) -> None:
    (project / "my_task.py").write_text(MODULE)
    settings = (*STRATEGIES[name], "launch.nproc=2", "launch.timeout=60", "train.steps=3", "optim.warmup=0")
    settings += ("eval.every=null", "data.validation=null", "tracking.log_every=1")
    for run, task in (("given", ("task.cross_entropy=plain",)), ("own", ("task.type=my_task:Own",))):
        done = run_cli("train", "config.yaml", *settings, *task, f"run.name={run}", cwd=project)
        assert done.code == ExitCode.DONE, done.err
    own, given = (losses(project / "runs" / run) for run in ("own", "given"))
    assert sorted(own) == [1, 2, 3]
    assert largest_difference(own, given) < 1e-6
    refused = run_cli("train", "config.yaml", *settings, "task.type=my_task:Detached", "run.name=none", cwd=project)
    assert refused.code == ExitCode.WRONG_REQUEST, refused.err
    assert refused.err.count("Detached.loss returns a loss without a gradient") == 1, refused.err
    assert "Traceback" not in refused.err
    assert not (project / "runs" / "none").exists()
