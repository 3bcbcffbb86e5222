"""A package that a setting needs, and that is not there, is named before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import make_project
from exhaustive import some

WITHOUT = """
import sys
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {package!r} else found(name, *rest)
sys.argv = ["drawbar", "train", "config.yaml", {setting!r}]
from drawbar.cli import run
try:
    run()
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("package", "setting", "extra"),
    some(
        [
            ("peft", "lora.rank=4", "lora"),
            ("torchao", "parallel.fp8=tensorwise", "fp8"),
            ("liger_kernel", "task.cross_entropy=liger", "liger"),
            ("deepspeed", "parallel.strategy=deepspeed", "deepspeed"),
            ("s3fs", "checkpoint.remote=s3://bucket/runs", "object-store"),
            ("wandb", "tracking.trackers={wandb: {}}", "wandb"),
            ("mlflow", "tracking.trackers={mlflow: {}}", "mlflow"),
            ("trackio", "tracking.trackers={trackio: {}}", "trackio"),
        ],
        3,
    ),
)
def test_a_missing_package_is_named_at_once(package: str, setting: str, extra: str, tmp_path: Path) -> None:
    project = make_project(tmp_path)
    script = WITHOUT.format(package=package, setting=setting)
    done = subprocess.run([sys.executable, "-c", script], cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"it needs the package {package}, which is not installed" in done.stderr
    assert f"drawbar[{extra}]" in done.stderr
    assert not (project / "runs").exists()
