"""The commands `drawbar config show`, `schema` and `explain`, and what they import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from drawbar.cli.config import config
from drawbar.config.io.load_config import load_config
from drawbar.config.schema.run_config import TaskConfig
from drawbar.errors import UserError


class Scoring:
    """Stands for a script's own task: only its options matter here."""

    class Config(TaskConfig):
        threshold: float = 0.5


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("optim:\n  lr: 0.5\ndata: {train: [a, b]}\n")
    return "config.yaml"


def run(*arguments: str, task: type | None = None) -> str:
    result = CliRunner().invoke(config, arguments, obj=task, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_prints_a_configuration(path):
    text = run("show", path, "optim.eps=1e-6")
    Path("again.yaml").write_text(text)
    assert load_config("again.yaml").config == load_config(path, ["optim.eps=1e-6"]).config
    assert "#" not in text


def test_show_origins(path):
    text = run("show", path, "optim.eps=1e-6", "--origins")
    assert "  lr: 0.5  # config.yaml:2\n" in text
    assert "  train: [a, b]  # config.yaml:3\n" in text
    assert "# command line\n" in text
    assert "  name: adamw\n" in text


def test_show_of_a_wrong_configuration_is_a_user_error(path):
    with pytest.raises(UserError, match=r"did you mean optim\.lr"):
        run("show", path, "optim.lrr=1")


def test_show_the_json_of_deepspeed(path):
    settings = ["deepspeed.preset=zero2", "launch.nproc=2", "precision=bf16", "device=cpu"]
    values = json.loads(run("show", path, *settings, "--deepspeed"))
    assert values["zero_optimization"] == {"stage": 2}
    assert values["train_batch_size"] == 2 * values["train_micro_batch_size_per_gpu"]
    assert values["bf16"] == {"enabled": True}
    assert json.loads(run("show", path, "deepspeed={}", "device=cpu", "--deepspeed"))["train_batch_size"] == 32


def test_show_the_json_of_deepspeed_with_a_file(path):
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}')
    arguments = ["show", path, "deepspeed.config=ds.json", "precision=fp32", "device=cpu", "--deepspeed"]
    result = CliRunner().invoke(config, [*arguments, "deepspeed.preset=zero3"], catch_exceptions=False)
    assert json.loads(result.stdout)["zero_optimization"] == {"stage": 3, "zero_quantized_weights": True}
    assert "note: ds.json: zero_optimization.zero_quantized_weights: parameters are rounded" in result.stderr
    with pytest.raises(
        UserError, match=r"ds\.json: zero_optimization\.stage = 3 contradicts parallel\.zero_stage=1 \("
    ):
        run(*arguments, "parallel.zero_stage=1")


def test_json_of_deepspeed_for_another_strategy(path):
    with pytest.raises(UserError, match="DeepSpeed does not run this configuration") as caught:
        run("show", path, "parallel.strategy=ddp", "--deepspeed")
    assert "deepspeed.preset=zero2" in caught.value.remedy
    assert CliRunner().invoke(config, ["show", path, "--deepspeed", "--origins"]).exit_code == 2


def test_explain_with_and_without_file(path):
    assert "from:     config.yaml:2" in run("explain", "optim.lr", path)
    assert "from:     command line" in run("explain", "optim.lr", path, "optim.lr=1.0")
    assert "from:     command line" in run("explain", "optim.lr", "optim.lr=1.0")
    assert "from:     default" in run("explain", "optim.lr")


def test_schema(path):
    assert "CausalLMConfig" in json.loads(run("schema"))["$defs"]
    assert "CausalLMConfig" in json.loads(run("schema", path))["$defs"]


def test_own_task_of_a_script(path):
    assert "threshold: 0.5" in run("show", path, task=Scoring)
    assert "task.threshold = 0.7" in run("explain", "task.threshold", "task.threshold=0.7", task=Scoring)
    properties = json.loads(run("schema", task=Scoring))["$defs"]["Config"]["properties"]
    assert set(properties) == {"type", "threshold"}


@pytest.mark.parametrize("command", ["show", "schema", "explain"])
def test_help_teaches_by_example(command):
    assert f"\n    drawbar config {command} " in run(command, "--help")
    assert f"\n    drawbar config {command} " in run("--help")


def test_help_imports_only_click():
    script = (
        "import sys\n"
        "import drawbar.cli.config\n"
        "print(sorted({'torch', 'pydantic', 'ruamel.yaml', 'rich', 'numpy'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
