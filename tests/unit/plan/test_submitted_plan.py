"""What `drawbar submit` does with a plan, and what the report says of it."""

import json
from pathlib import Path

import pytest

from drawbar.config.io.load_config import load_config
from drawbar.errors import UserError
from drawbar.jobs.job import make_job
from drawbar.jobs.preflight import _judge, check_memory
from drawbar.report.recorded_run import read_recorded_run
from drawbar.util.run_dir import plan_file

pytestmark = pytest.mark.exhaustive

LLAMA = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 300}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a line of text\n" * 20)
    return tmp_path


@pytest.mark.usefixtures("project")
def test_a_run_that_cannot_fit_is_refused_unless_it_is_forced() -> None:
    settings = [
        *("task.model=llama", f"task.from_scratch={LLAMA}", "task.tokenizer={train: byte_bpe, vocab_size: 300}"),
        *("data.train=text.txt", "data.sequence_length=32", "train.steps=3", "train.global_batch=2"),
        *("optim.name=sgd", "parallel.activation_checkpointing=full"),  # few changes to try
        "cluster={nodes: 1, gpus_per_node: 2, gpu_memory: 100KiB}",
    ]
    config = load_config(None, settings).config
    assert config.cluster is not None
    note, plan = check_memory(make_job(config, config.cluster, None), None, force=True)
    assert plan is not None
    assert not plan["fits"]
    assert note is not None
    assert "--force" in note
    with pytest.raises(UserError, match="does not fit") as refused:
        _judge(dict(plan), "100KiB", force=False)
    assert "--force" in str(refused.value.remedy)
    assert "planned: a rank takes" in _judge({**plan, "fits": True}, "80GiB", force=False)


def test_nothing_is_planned_without_the_memory_of_the_gpus(project: Path) -> None:
    config = load_config(None, ["data.train=text.txt", "train.steps=3", "cluster={gpus_per_node: 2}"]).config
    assert config.cluster is not None
    assert check_memory(make_job(config, config.cluster, None), None, force=False)[1] is None


def test_the_report_has_the_plan(tmp_path: Path) -> None:
    assert read_recorded_run(tmp_path, 50).plan is None
    path = plan_file(tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps({"strategy": "fsdp", "peak": 2**30, "fits": True, "hours": 2.5}))
    found = read_recorded_run(tmp_path, 50)
    assert found.plan is not None
    assert (found.plan.peak, found.plan.hours, found.measured_peak) == (2**30, 2.5, None)
    path.write_text('{"peak": 1}')
    assert any("no plan" in problem for problem in read_recorded_run(tmp_path, 50).problems)
