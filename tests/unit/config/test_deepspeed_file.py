"""A user's DeepSpeed JSON: completed by the run's settings and passed on; what contradicts the run is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from drawbar.cli.train import train
from drawbar.config.io.load_config import LoadedConfig, load_config
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules
from drawbar.config.schema.run_config import RunConfig
from drawbar.deepspeed import config_json as tables
from drawbar.deepspeed.config_json import DeepSpeedJson, check_start, deepspeed_json
from drawbar.deepspeed.state import import_deepspeed
from drawbar.errors import ExitCode, UserError

FILES = Path(__file__).parent / "deepspeed"
LITERAL = [  # what zero2.json says in numbers
    *("train.global_batch=32", "train.micro_batch=8", "optim.lr=3e-5", "optim.betas=[0.8, 0.999]"),
    *("optim.weight_decay=3e-7", "optim.schedule=constant", "optim.warmup=500", "precision=bf16"),
]
TRAINABLE = ["data.train=a.txt", "train.steps=1000"]
PROCESSES = 2


def load(path: Path, *settings: str) -> LoadedConfig:
    return load_config(None, [*TRAINABLE, f"deepspeed.config={path}", *settings])


def made(path: Path, *settings: str, precision: str = "fp32") -> DeepSpeedJson:
    loaded = load(path, *settings)
    check_rules(loaded, RULES + TRAIN_RULES)
    chosen = loaded.config.precision
    return deepspeed_json(loaded, PROCESSES, precision if chosen == "auto" else chosen)


def write(folder: Path, values: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def refusal(folder: Path, values: Any, *settings: str) -> str:
    with pytest.raises(UserError) as caught:
        check_start(load(write(folder, values), *settings), PROCESSES)
    assert caught.value.remedy
    assert str(folder / "ds.json") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "stage", "place"),
    [("zero2", LITERAL, 2, None), ("zero3_offload", ["deepspeed.preset=zero3_offload"], 3, "cpu")],
)
def test_files_as_people_write_them(name: str, settings: list[str], stage: int, place: str | None) -> None:
    found = made(FILES / f"{name}.json", *settings)
    zero = found.values["zero_optimization"]
    assert zero["stage"] == stage
    assert [zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")] == [place, place]
    assert (found.values["train_batch_size"], found.values["gradient_clipping"]) == (32, 1.0)
    assert found.values["steps_per_print"] == 2000
    assert not {"optimizer", "scheduler", "amp"} & set(found.values)
    assert "auto" not in json.dumps(found.values)
    assert found.notes == ()
    pytest.importorskip("deepspeed")
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.config import DeepSpeedConfig

    values = {key: value for key, value in found.values.items() if key != "train_batch_size"}
    assert DeepSpeedConfig(values).zero_config.stage == stage


def test_a_file_sets_nothing() -> None:
    loaded = load(FILES / "zero2.json")
    assert loaded.config == load_config(None, TRAINABLE).config.model_copy(
        update={"deepspeed": loaded.config.deepspeed}
    )
    assert not [key for key, origin in loaded.origins.items() if "json" in str(origin)]


def test_auto_null_and_what_is_not_there_are_the_runs(tmp_path: Path) -> None:
    settings = ["deepspeed.preset=zero3_offload", "precision=bf16", "train.micro_batch=4", "train.gradient_clip=0.5"]
    sections = dict.fromkeys(("train_batch_size", tables.ROWS, tables.STEPS, "gradient_clipping"), "auto")
    automatic = {
        **sections,
        "bf16": {"enabled": "auto"},
        "fp16": "auto",
        "optimizer": {"type": "auto", "params": "auto"},
        "scheduler": None,
        "zero_optimization": {"stage": "auto", "offload_optimizer": "auto", "reduce_bucket_size": "auto"},
    }
    without = deepspeed_json(load_config(None, [*TRAINABLE, *settings]), PROCESSES, "bf16").values
    assert made(write(tmp_path, automatic), *settings).values == without
    assert made(write(tmp_path, {}), *settings).values == without
    assert without["train_micro_batch_size_per_gpu"] == 4
    assert without["gradient_accumulation_steps"] == 4
    assert without["gradient_clipping"] == 0.5


def test_the_rest_is_passed_on_as_it_is(tmp_path: Path) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 5e6, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "other": [1]}
    values = {"zero_optimization": zero, "fp16": {"loss_scale_window": 100}, "comms_logger": {"enabled": True}}
    found = made(write(tmp_path, {**values, "unheard_of": {"a": {"b": 1}}}), "parallel.offload=true", "precision=fp16")
    assert found.values["zero_optimization"] == zero
    assert found.values["comms_logger"] == {"enabled": True}
    assert found.values["unheard_of"] == {"a": {"b": 1}}
    assert found.values["fp16"]["loss_scale_window"] == 100
    assert found.values["fp16"]["initial_scale_power"] == 16  # as without the file


def test_bf16_of_stage_0_is_by_autocast_with_a_file_too(tmp_path: Path) -> None:
    path = write(tmp_path, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}})
    settings = ["precision=bf16", "parallel.strategy=deepspeed", "parallel.zero_stage=0"]
    without = deepspeed_json(load_config(None, [*TRAINABLE, *settings]).config, PROCESSES, "bf16")
    assert made(path, *settings) == without
    assert without.values["bf16"] == {"enabled": False}


def test_a_configuration_made_in_python_has_no_origins() -> None:
    section = load(FILES / "zero3_offload.json").config.deepspeed
    with pytest.raises(
        UserError, match=r"zero_optimization\.stage = 3 contradicts parallel\.zero_stage=null, which makes it 2"
    ):
        deepspeed_json(RunConfig(deepspeed=section), 1, "fp32")


def zero_of(**values: Any) -> dict[str, Any]:
    return {"zero_optimization": values}


def optimizer(**values: Any) -> dict[str, Any]:
    return {"optimizer": {"params": values}}


def scheduler(**values: Any) -> dict[str, Any]:
    return {"scheduler": {"params": values}}


CONTRADICTIONS = [
    ({"train_batch_size": 64}, [], "train_batch_size = 64 contradicts train.global_batch=32 (default)"),
    ({"train_batch_size": 64}, [], 'write "auto" in the file, or set train.global_batch=64'),
    (
        {"gradient_accumulation_steps": 4},
        ["train.micro_batch=8"],
        "gradient_accumulation_steps = 4 contradicts train.micro_batch=8 (command line), which makes it 2",
    ),
    ({"gradient_accumulation_steps": 4}, [], "set train.micro_batch to the 16 rows of a rank, divided by it"),
    (
        {"train_micro_batch_size_per_gpu": 4},
        ["train.micro_batch=8"],
        "train_micro_batch_size_per_gpu = 4 contradicts train.micro_batch=8 (command line)",
    ),
    (
        {"train_micro_batch_size_per_gpu": 4},
        ["train.micro_batch_tokens=99"],
        "train_micro_batch_size_per_gpu = 4 contradicts train.micro_batch_tokens=99 (command line)",
    ),
    (
        {"gradient_accumulation_steps": 1},
        ["train.micro_batch_tokens=99"],
        "gradient_accumulation_steps = 1 contradicts train.micro_batch_tokens=99 (command line)",
    ),
    ({"gradient_clipping": 0.5}, [], "gradient_clipping = 0.5 contradicts train.gradient_clip=1.0 (default)"),
    ({"gradient_clipping": 0}, [], "set train.gradient_clip, to null for 0"),
    ({"gradient_clipping": 1}, ["train.gradient_clip=null"], "contradicts train.gradient_clip=null (command line)"),
    (
        {"fp16": {"enabled": True}},
        ["precision=bf16"],
        "fp16.enabled = true contradicts precision=bf16 (command line), which makes it false",
    ),
    ({"bf16": {"enabled": False}}, ["precision=bf16"], "bf16.enabled = false contradicts precision=bf16"),
    (
        zero_of(stage=3),
        ["parallel.zero_stage=2"],
        "zero_optimization.stage = 3 contradicts parallel.zero_stage=2 (command line)",
    ),
    (zero_of(stage=3), [], "contradicts parallel.zero_stage=null (default), which makes it 2"),
    (zero_of(stage=3), [], 'write "auto" in the file, or set parallel.zero_stage=3'),
    (zero_of(stage=3), ["deepspeed.preset=zero2"], "or set another deepspeed.preset, or parallel.zero_stage instead"),
    (zero_of(stage="2"), [], 'zero_optimization.stage = "2" contradicts parallel.zero_stage=null'),
    (zero_of(stage=3), ["deepspeed.preset=zero2"], "contradicts deepspeed.preset=zero2 (command line), which makes it"),
    (
        zero_of(offload_optimizer={"device": "none"}),
        ["parallel.offload=true"],
        'offload_optimizer.device = "none" contradicts parallel.offload=true (command line), which makes it "cpu"',
    ),
    (
        zero_of(offload_optimizer={"device": "cpu"}),
        [],
        'device = "cpu" contradicts deepspeed.offload_optimizer=null (default), which makes it "none"',
    ),
    (
        zero_of(offload_param={"device": "cpu"}),
        ["deepspeed={preset: zero3_offload, offload_parameters: none}"],
        'offload_param.device = "cpu" contradicts deepspeed.offload_parameters=none',
    ),
    (
        zero_of(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/one"}),
        ["deepspeed={preset: zero3, offload_optimizer: /other}"],
        'offload_optimizer.nvme_path = "/one" contradicts deepspeed.offload_optimizer=/other',
    ),
    ({"tensor_parallel": {"autotp_size": 2}}, [], "tensor_parallel.autotp_size = 2 contradicts parallel.tensor=1"),
    ({"tensor_parallel": {"tp": {"tp_size": 2}}}, [], "tensor_parallel.tp.tp_size = 2 contradicts parallel.tensor=1"),
    (optimizer(lr=1), [], "optimizer.params.lr = 1 contradicts optim.lr=0.0003 (default)"),
    (optimizer(lr=1), [], 'write "auto" in the file, or set optim.lr=1'),
    (
        optimizer(betas=[0.9, 0.95]),
        [],
        "params.betas = [0.9, 0.95] contradicts optim.betas=[0.9, 0.999] (default)\n",
    ),
    (optimizer(eps=1e-6), [], "optimizer.params.eps = 1e-06 contradicts optim.eps=1e-08 (default)"),
    (optimizer(weight_decay=3), [], "optimizer.params.weight_decay = 3 contradicts optim.weight_decay="),
    (optimizer(momentum=0.9), ["optim.name=sgd"], "optimizer.params.momentum = 0.9 contradicts optim.momentum=null"),
    (optimizer(max_grad_norm=5), [], "optimizer.params.max_grad_norm = 5 contradicts train.gradient_clip=1.0"),
    ({"optimizer": {"type": "SGD"}}, [], 'optimizer.type = "SGD" contradicts optim.name=adamw (default)'),
    ({"optimizer": {"type": "Adam"}}, ["optim.name=sgd"], 'optimizer.type = "Adam" contradicts optim.name=sgd'),
    ({"optimizer": {"type": "Lamb"}}, [], "DeepSpeed runs no other optimizer here"),
    (
        {"scheduler": {"type": "WarmupCosineLR"}},
        [],
        'scheduler.type = "WarmupCosineLR" contradicts optim.schedule=linear (default), which makes it "WarmupDecayLR"',
    ),
    ({"scheduler": {"type": "OneCycle"}}, [], "set optim.schedule (WarmupLR is constant"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, ["optim.min_lr_ratio=0.1"], "where optim.min_lr_ratio=0"),
    (scheduler(warmup_max_lr=1), [], "scheduler.params.warmup_max_lr = 1 contradicts optim.lr=0.0003"),
    (scheduler(cos_min_ratio=1), ["optim.schedule=cosine"], "cos_min_ratio = 1 contradicts optim.min_lr_ratio=0.0"),
    (scheduler(total_num_steps=5), [], "total_num_steps = 5 contradicts train.steps=1000 (command line)"),
    (scheduler(total_num_steps=5), ["optim.schedule_steps=9"], "contradicts optim.schedule_steps=9 (command line)"),
    (
        scheduler(total_num_steps=5),
        ["train.steps=null", "train.epochs=2"],
        "total_num_steps = 5 contradicts train.steps=null (command line)",
    ),
    (
        scheduler(warmup_num_steps=5),
        ["optim.warmup=0.1"],
        "warmup_num_steps = 5 contradicts optim.warmup=0.1 (command line), which makes it 100",
    ),
]


@pytest.mark.parametrize(("values", "settings", "expected"), CONTRADICTIONS)
def test_contradictions_name_both_places(tmp_path: Path, values: Any, settings: list[str], expected: str) -> None:
    assert expected in refusal(tmp_path, values, *settings)


def nested(key: str, value: Any) -> Any:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", tables.REFUSED)
def test_what_drawbar_does_itself_is_refused_and_left_out_where_it_is_off(tmp_path: Path, key: str) -> None:
    for value in (True, {"enabled": True}, {"size": 7}):
        assert f": {key} = {json.dumps(value)}: {tables.REFUSED[key]}" in refusal(tmp_path, nested(key, value))
    for value in (False, {"enabled": False, "size": 7}, {"enabled": "auto"}, 0):
        found = made(write(tmp_path, nested(key, value)))
        assert tables._at(found.values, key) is None


@pytest.mark.parametrize("key", tables.OLDER)
def test_older_names_are_refused_whatever_they_say(tmp_path: Path, key: str) -> None:
    for value in (True, False):
        assert f"{key} is an older name" in refusal(tmp_path, nested(key, value))


@pytest.mark.parametrize("key", tables.FIXED)
def test_what_no_setting_can_change_is_refused(tmp_path: Path, key: str) -> None:
    value, reason = tables.FIXED[key]
    made(write(tmp_path, nested(key, value)))
    wrong = not value if isinstance(value, bool) else "sum" if isinstance(value, str) else 3
    assert f": {key} = {json.dumps(wrong)}: {reason}" in refusal(tmp_path, nested(key, wrong))


@pytest.mark.parametrize(
    "key",
    ["optimizer.params.amsgrad", "optimizer.params.learning_rate", "scheduler.params.warmup_steps", "optimizer.a"],
)
def test_what_no_setting_says_of_optimizer_and_schedule_is_refused(tmp_path: Path, key: str) -> None:
    assert f"{key} = true: drawbar makes optimizer and schedule itself" in refusal(tmp_path, nested(key, True))
    made(write(tmp_path, nested(key, False)))


def test_how_the_optimizer_computes_is_not_asked(tmp_path: Path) -> None:
    values = {"type": "adam", "params": {"torch_adam": True, "fused": True}, "legacy_fusion": True}
    assert "optimizer" not in made(write(tmp_path, {"optimizer": values})).values


@pytest.mark.parametrize("key", tables.SECTIONS)
def test_sections_are_objects(tmp_path: Path, key: str) -> None:
    assert f"{key} is no JSON object" in refusal(tmp_path, nested(key, [2]))


def test_one_error_for_all_that_is_wrong(tmp_path: Path) -> None:
    text = refusal(tmp_path, {"train_batch_size": 64, **optimizer(lr=1, eps=2), "amp": {"enabled": True}})
    assert "4 problems:" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "a": 1,\n}', "not valid JSON: Expecting property name enclosed in double quotes: line 3"),
        ('{"bf16": {"enabled": true,\n "enabled": false}}', "not valid JSON: it has a key twice in one object"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "holds no JSON object"),
        ("", "not valid JSON"),
    ],
)
def test_what_is_not_json(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    loaded = load(tmp_path / "ds_confg.json")  # can be read: a run may have been copied without it
    with pytest.raises(UserError, match="there is no such file") as caught:
        check_start(loaded, PROCESSES)
    assert "did you mean" in str(caught.value)
    with pytest.raises(UserError, match="a folder, not a JSON file"):
        check_start(load(tmp_path), PROCESSES)


@pytest.mark.parametrize("key", tables.CHANGES_LOSSES)
def test_what_changes_the_numbers_is_passed_on_with_a_warning(tmp_path: Path, key: str) -> None:
    value = {"grad_accum_dtype": "bf16"} if key == "data_types" else "bf16" if "type" in key else True
    found = made(write(tmp_path, nested(key, value)), precision="bf16")
    assert tables._at(found.values, key) == value
    assert [note for note in found.notes if f"ds.json: {key}: {tables.CHANGES_LOSSES[key]}" in note] == [*found.notes]
    assert len(found.notes) == 1
    same = made(write(tmp_path, nested(key, {"grad_accum_dtype": "fp32"} if key == "data_types" else "fp32")))
    assert same.notes == ()


def test_what_deepspeed_has_removed_is_refused() -> None:
    pytest.importorskip("deepspeed")
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime import config

    removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    removed |= {f"{tables.ZERO}.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    assert removed <= set(tables.REFUSED)


@pytest.mark.parametrize(
    ("values", "settings"),
    [({"train_batch_size": 64}, []), ("{", []), (zero_of(stage=2), ["parallel.pipeline=2"])],
    ids=["another batch", "not JSON", "a pipeline with stage 2"],
)
def test_refused_before_any_process_starts(tmp_path: Path, values: Any, settings: list[str]) -> None:
    arguments = [*TRAINABLE, f"deepspeed.config={write(tmp_path, values)}", f"run.dir={tmp_path / 'runs'}", *settings]
    with pytest.raises(UserError) as caught:  # in this process, which would have started others
        CliRunner().invoke(train, [*arguments, f"launch.nproc={PROCESSES}"], catch_exceptions=False)
    assert caught.value.exit_code == ExitCode.WRONG_REQUEST
    assert str(tmp_path / "ds.json") in str(caught.value)
    assert not (tmp_path / "runs").exists()
