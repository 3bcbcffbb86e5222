"""A user's DeepSpeed JSON: files as people write them are taken, and what contradicts the run is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from drawbar.cli.train import train
from drawbar.config.deepspeed import deepspeed_keys as keys
from drawbar.config.deepspeed.deepspeed_file import read_json
from drawbar.config.deepspeed.deepspeed_json import DeepSpeedJson, check_deepspeed, deepspeed_json
from drawbar.config.io.load_config import LoadedConfig, dump_yaml, load_config
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules
from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import ExitCode, UserError
from drawbar.parallel.deepspeed.deepspeed_state import import_deepspeed

FILES = Path(__file__).parent / "deepspeed"
LITERAL = [  # what zero2.json says in numbers
    *("train.global_batch=32", "optim.lr=3e-5", "optim.betas=[0.8, 0.999]", "optim.weight_decay=3e-7"),
    *("optim.schedule=constant", "optim.warmup=500"),
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
        check_deepspeed(load(write(folder, values), *settings), PROCESSES)
    assert caught.value.remedy
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "stage", "places", "notes"),
    [
        ("zero2", LITERAL, 2, (None, None), ["warmup_type"]),
        (
            "zero2_offload",
            ["optim.schedule=constant"],
            2,
            ("cpu", None),
            ["zero_optimization.cpu_offload:", "zero_optimization.cpu_offload_use_pin_memory"],
        ),
        ("zero3", [], 3, (None, None), ["stage3_gather_fp16_weights_on_model_save", "tensorboard", '"auto"']),
        ("zero3_offload", [], 3, ("cpu", "cpu"), ["activation_checkpointing", '"auto"']),
    ],
)
def test_files_as_people_write_them(
    name: str, settings: list[str], stage: int, places: tuple[str | None, ...], notes: list[str]
) -> None:
    found = made(FILES / f"{name}.json", *settings)
    zero = found.values["zero_optimization"]
    assert zero["stage"] == stage
    assert tuple(zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")) == places
    assert (found.values["train_batch_size"], found.values["gradient_clipping"]) == (32, 1.0)
    assert "optimizer" not in found.values
    assert "scheduler" not in found.values
    assert "auto" not in json.dumps(found.values)
    assert len(found.notes) == len(notes)
    for note, expected in zip(found.notes, notes, strict=True):
        assert expected in note
    pytest.importorskip("deepspeed")
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.config import DeepSpeedConfig

    values = {key: value for key, value in found.values.items() if key != "train_batch_size"}
    assert DeepSpeedConfig(values).zero_config.stage == stage


def test_what_a_file_decides() -> None:
    loaded = load(FILES / "zero2_offload.json")
    assert loaded.config.precision == "fp16"
    assert loaded.config.parallel.zero_stage == 2
    assert str(loaded.origin("precision")) == f"{FILES / 'zero2_offload.json'}: fp16.enabled"
    values = made(FILES / "zero2_offload.json", "optim.schedule=constant").values
    assert values["fp16"]["loss_scale_window"] == 1000  # as in the file
    assert values["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    values = made(FILES / "zero2.json", *LITERAL).values
    assert (values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"]) == (8, 2)
    assert values["bf16"] == {"enabled": True}
    assert values["steps_per_print"] == 2000


def test_bf16_of_stage_0_is_drawbars_to_say(tmp_path: Path) -> None:
    path = write(tmp_path, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}})
    assert load(path).config.precision == "bf16"
    assert (
        made(path).values
        == deepspeed_json(
            load(
                path, "deepspeed.config=null", "precision=bf16", "parallel.strategy=deepspeed", "parallel.zero_stage=0"
            ).config,
            PROCESSES,
            "bf16",
        ).values
    )


def test_a_file_that_says_nothing_of_zero_is_stage_0(tmp_path: Path) -> None:
    path = write(tmp_path, {"comms_logger": {"enabled": True}})
    found = made(path)
    assert found.values["zero_optimization"] == {"stage": 0}
    assert found.values["comms_logger"] == {"enabled": True}
    assert found.notes == ()


def test_auto_leaves_it_to_the_run(tmp_path: Path) -> None:
    path = write(tmp_path, {"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}})
    assert load(path).config.parallel.zero_stage is None
    assert made(path, precision="bf16").values["bf16"] == {"enabled": True}
    assert made(path, "parallel.zero_stage=3", "parallel.offload=true").values["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }


def test_a_run_goes_on_with_what_the_file_decided(tmp_path: Path) -> None:
    first = load(FILES / "zero3_offload.json").config
    (tmp_path / "config.yaml").write_text(dump_yaml(first))
    again = load_config(tmp_path / "config.yaml")
    assert again.config == first
    check_deepspeed(again, PROCESSES)


def test_a_configuration_made_in_python_has_no_origins() -> None:
    section = load(FILES / "zero3.json").config.deepspeed
    with pytest.raises(
        UserError, match=r"zero_optimization\.stage = 3 contradicts parallel\.zero_stage=null, which is 2"
    ):
        deepspeed_json(RunConfig(deepspeed=section), 1, "fp32")


SECTION = {"zero_optimization": {"stage": 2}}
CONTRADICTIONS = [
    ({"train_batch_size": 64}, [], "train_batch_size = 64 contradicts train.global_batch=32 (default)"),
    (
        {"gradient_accumulation_steps": 4},
        ["train.micro_batch=8"],
        "gradient_accumulation_steps = 4 contradicts train.global_batch=32 (default): each data-parallel rank has 16 "
        "rows of it, in 2 micro-batches of 8",
    ),
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
        {"gradient_accumulation_steps": 4},
        ["train.micro_batch_tokens=99"],
        "gradient_accumulation_steps = 4 contradicts train.micro_batch_tokens=99 (command line)",
    ),
    ({"gradient_clipping": 0.5}, [], "gradient_clipping = 0.5 contradicts train.gradient_clip=1.0 (default)"),
    ({"gradient_clipping": 0}, [], "set train.gradient_clip=null"),
    ({"fp16": {"enabled": True}}, ["precision=bf16"], "fp16.enabled = true contradicts precision=bf16 (command line)"),
    ({"bfloat16": {"enabled": False}}, ["precision=bf16"], "bf16.enabled = false contradicts precision=bf16"),
    (
        {"zero_optimization": {"stage": 3}},
        ["parallel.zero_stage=2"],
        "zero_optimization.stage = 3 contradicts parallel.zero_stage=2 (command line)",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}},
        ["parallel.offload=true"],
        'zero_optimization.offload_optimizer = {"device": "none"} contradicts parallel.offload=true (command line)',
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}},
        ["deepspeed.offload_optimizer=cpu"],
        "contradicts deepspeed.offload_optimizer=cpu (command line): it lies in cpu",
    ),
    (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}},
        ["deepspeed.reduce_bucket_size=7"],
        "zero_optimization.reduce_bucket_size = 500000000.0 contradicts deepspeed.reduce_bucket_size=7 (command line)",
    ),
    ({"tensor_parallel": {"autotp_size": 2}}, [], "tensor_parallel.autotp_size = 2 contradicts parallel.tensor=1"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, [], "optimizer.params.lr = 1 contradicts optim.lr=0.0003"),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
        [],
        "optimizer.params.betas = [0.9, 0.95] contradicts optim.betas=[0.9, 0.999]",
    ),
    ({"optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}}, [], "contradicts optim.eps=1e-08 (default)"),
    ({"optimizer": {"type": "SGD"}}, [], 'optimizer.type = "SGD" contradicts optim.name=adamw (default)'),
    ({"optimizer": {"type": "Lamb"}}, [], 'optimizer.type = "Lamb": the optimizers here are adamw, sgd, adafactor'),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, [], "weight decay is decoupled here"),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 5}}}, [], "contradicts train.gradient_clip=1.0"),
    ({"scheduler": {"type": "WarmupCosineLR"}}, [], "contradicts optim.schedule=linear (default): WarmupCosineLR is"),
    ({"scheduler": {"type": "OneCycle"}}, [], 'scheduler.type = "OneCycle": of DeepSpeed\'s schedules, drawbar has'),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": "auto"}}},
        [],
        "scheduler.params.total_num_steps = 5 contradicts train.steps=1000 (command line)",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5}}},
        ["train.steps=null", "train.epochs=2"],
        "scheduler.params.total_num_steps = 5 contradicts train.epochs=2.0 (command line): the number of steps",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}},
        ["optim.warmup=0.1"],
        "scheduler.params.warmup_num_steps = 5 contradicts optim.warmup=0.1 (command line), which is 100 here",
    ),
    ({"scheduler": {"type": "WarmupDecayLR"}}, ["optim.min_lr_ratio=0.1"], "contradicts optim.min_lr_ratio=0.1"),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "log"}}},
        [],
        'scheduler.params.warmup_type = "log": the warm-up here is a straight line',
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 1e-6}}},
        [],
        "scheduler.params.warmup_min_lr = 1e-06: the warm-up here begins at 0",
    ),
    ({"gradient_allreduce_op": "sum"}, [], 'gradient_allreduce_op = "sum": the loss is divided'),
    ({"curriculum_learning": {"enabled": True}}, [], "it would cut the samples that data.* describes"),
    ({"elasticity": {"enabled": True, "max_train_batch_size": 2000}}, [], "set train.global_batch"),
    ({"torch_autocast": {"enabled": True}}, [], "the dtype is the run's own"),
    ({"zero_optimization": {"stage": 2, "mics_shard_size": 8}}, [], "parallel.strategy=fsdp replicate=N"),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, [], "trained weights are fp32 in every run"),
    ({"zero_optimization": {"stage": "3"}}, [], 'zero_optimization.stage = "3": expected a number'),
    ({"zero_optimization": {"stage": 2, "overlap_comm": 1}}, [], "overlap_comm = 1: expected true or false"),
    ({"zero_optimization": [2]}, [], "zero_optimization = [2]: expected an object"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, [], "nvme_path is missing"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}, [], "expected none, cpu or nvme"),
    ({"zero_optimization": {"stage": 2, "cpu_offload_params": True}}, [], "stage 2 keeps parameters on the device"),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "none"}}},
        [],
        'cpu_offload = true: zero_optimization.offload_optimizer = {"device": "none"} says where, too',
    ),
    (
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
        [],
        'bfloat16 = {"enabled": false}: bf16 = {"enabled": true} says it too',
    ),
]


@pytest.mark.parametrize(("values", "settings", "expected"), CONTRADICTIONS)
def test_contradictions_name_both_places(tmp_path: Path, values: Any, settings: list[str], expected: str) -> None:
    text = refusal(tmp_path, {**SECTION, **values}, *settings)
    assert expected in text
    assert str(tmp_path / "ds.json") in text


def test_one_error_for_all_that_is_wrong(tmp_path: Path) -> None:
    text = refusal(
        tmp_path, {"train_batch_size": 64, "optimizer": {"params": {"lr": 1, "eps": 2}}, "amp": {"enabled": 1}}
    )
    assert "4 problems:" in text
    assert 'write "auto" in the file, or set optim.lr=1' in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "a": 1,\n}', "ds.json:3: not valid JSON: Expecting property name"),
        ('{"zero_optimization": {"stage": 2}', "not valid JSON"),
        ('{\n // ZeRO\n "a": 1}', "ds.json:2: not valid JSON"),
        (
            '{"bf16": {"enabled": true,\n "enabled": false}}',
            "ds.json:2: not valid JSON: enabled is twice in one object",
        ),
        ("[1]", "holds no JSON object"),
        ('{"gradient_clipping": Infinity}', "Infinity is no number"),
        ("", "ds.json:1: not valid JSON"),
    ],
)
def test_what_is_not_json(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    loaded = load(tmp_path / "ds_confg.json")  # can be read: a run may have been copied without it
    with pytest.raises(UserError, match="there is no such file") as caught:
        check_deepspeed(loaded, PROCESSES)
    assert "did you mean" in str(caught.value)
    assert "ds_config.json" in str(caught.value)
    with pytest.raises(UserError, match="a folder, not a JSON file"):
        check_deepspeed(load(tmp_path), PROCESSES)


def test_unknown_keys_are_named_and_left_out(tmp_path: Path) -> None:
    values = {
        "zero_optimisation": {"stage": 1},
        "zero_optimization": {"stage": 3, "reduce_bucket_sise": 1, "offload_optimizer": {"devise": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"learning_rate": 1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_steps": 3}},
    }
    found = made(write(tmp_path, values))
    text = "\n".join(found.notes)
    assert len(found.notes) == 5
    assert "zero_optimisation: unknown to DeepSpeed, and left out; did you mean zero_optimization?" in text
    assert "zero_optimization.reduce_bucket_sise: unknown to DeepSpeed, and left out; did you mean reduce_buc" in text
    assert (
        "zero_optimization.offload_optimizer.devise: unknown to DeepSpeed, and left out; did you mean device?" in text
    )
    assert "optimizer.params.learning_rate: unknown" in text
    assert "scheduler.params.warmup_steps: unknown to DeepSpeed, and left out; did you mean warmup_num_steps?" in text
    assert found.values["zero_optimization"] == {"stage": 3, "offload_optimizer": {}}


def test_what_is_switched_off_says_nothing(tmp_path: Path) -> None:
    off = {"enabled": False}
    values = {
        "elasticity": off,
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "sparse_gradients": False,
        "wandb": off,
    }
    found = made(write(tmp_path, {**values, "optimizer": None, "curriculum_learning": off}))
    assert found.notes == ()
    assert not {"elasticity", "amp", "sparse_gradients"} & set(found.values)


def test_what_changes_the_numbers_is_named(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2, "prefetch_bucket_size": 3}
    values = {"zero_optimization": zero, "fp32_allreduce": True, "zero_force_ds_cpu_optimizer": True}
    found = made(write(tmp_path, values))
    text = "\n".join(found.notes)
    assert "zero_quantized_weights: parameters are rounded" in text
    assert "zero_force_ds_cpu_optimizer: without effect here" in text
    assert found.values["zero_force_ds_cpu_optimizer"] is False
    assert found.values["communication_data_type"] == "fp32"
    assert "communication_data_type: gradients are summed" not in text  # fp32 is what drawbar itself has
    rounded = made(write(tmp_path, {"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}}))
    assert [note for note in rounded.notes if "losses are not those" in note] == [
        note for note in rounded.notes if "communication_data_type: gradients are summed" in note
    ]
    assert found.values["zero_optimization"]["stage3_prefetch_bucket_size"] == 3
    assert found.values["zero_optimization"]["zero_hpz_partition_size"] == 2


def test_older_forms_of_zero(tmp_path: Path) -> None:
    found = made(write(tmp_path, {"zero_optimization": True}))
    assert found.values["zero_optimization"] == {"stage": 1}
    assert 'zero_optimization: read as {"stage": 1}' in found.notes[0]


def test_known_keys_are_those_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime import config, lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    def names(model: Any) -> set[str]:
        return {name for field, info in model.model_fields.items() for name in (field, info.alias) if name}

    older = {*keys.RENAMED, *keys.LEGACY_FLAGS} - {"cpu_offload_params"}  # from a version before its tables
    assert names(DeepSpeedZeroConfig) == {*keys.ZERO, *older}
    assert names(DeepSpeedZeroOffloadOptimizerConfig) == set(keys.OFFLOAD_OPTIMIZER)
    assert names(DeepSpeedZeroOffloadParamConfig) == set(keys.OFFLOAD_PARAMETERS)
    assert names(DeepSpeedBF16Config) == set(keys.BF16)
    assert names(DeepSpeedFP16Config) == set(keys.FP16)
    # in Python alone these two have other names
    assert names(TPTrainingConfig) - {"tensor_parallel", "replace_with_kernel_inject"} == set(keys.TENSOR_PARALLEL)
    removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    assert removed <= {*keys.REFUSED, *keys.IGNORED}
    assert {f"{keys.ZERO_SECTION}.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS} <= set(keys.REFUSED)
    schedules = (lr_schedules.WarmupLR, lr_schedules.WarmupDecayLR, lr_schedules.WarmupCosineLR)
    parameters = {name for each in schedules for name in each.__init__.__code__.co_varnames}
    assert set(keys.SCHEDULER_PARAMS) <= parameters


BROKEN: dict[str, tuple[Any, list[str]]] = {
    "a comma too many": ('{"zero_optimization": {"stage": 2},}', []),
    "a name twice": ('{"zero_optimization": {"stage": 2, "stage": 3}}', []),
    "another stage": ({"zero_optimization": {"stage": 3}}, ["parallel.zero_stage=2"]),
    "another batch": ({**SECTION, "train_batch_size": 64}, []),
    "batches that do not multiply": ({**SECTION, "gradient_accumulation_steps": 3}, []),
    "another precision": ({**SECTION, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, []),
    "another learning rate": ({**SECTION, "optimizer": {"type": "AdamW", "params": {"lr": 1}}}, []),
    "another schedule": ({**SECTION, "scheduler": {"type": "WarmupLR"}}, []),
    "data that DeepSpeed chooses": ({**SECTION, "data_efficiency": {"enabled": True}}, []),
    "an optimizer of DeepSpeed's": ({**SECTION, "optimizer": {"type": "OneBitAdam"}}, []),
    "a pipeline with stage 2": (SECTION, ["parallel.pipeline=2"]),
    "a disk without a path": ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, []),
}


@pytest.mark.parametrize(("values", "settings"), BROKEN.values(), ids=BROKEN)
def test_refused_before_any_process_starts(tmp_path: Path, values: Any, settings: list[str]) -> None:
    arguments = [*TRAINABLE, f"deepspeed.config={write(tmp_path, values)}", f"run.dir={tmp_path / 'runs'}", *settings]
    with pytest.raises(UserError) as caught:  # in this process, which would have started others
        CliRunner().invoke(train, [*arguments, f"launch.nproc={PROCESSES}"], catch_exceptions=False)
    assert caught.value.exit_code == ExitCode.WRONG_REQUEST
    assert str(tmp_path / "ds.json") in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_settings_given_beside_a_file_win_over_what_it_leaves_open(tmp_path: Path) -> None:
    file = read_json(
        str(write(tmp_path, {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}))
    )
    assert file.at("train_micro_batch_size_per_gpu") is None
    loaded = load(tmp_path / "ds.json", "train.micro_batch=2", "precision=bf16", "deepspeed.offload_optimizer=cpu")
    check_deepspeed(loaded, PROCESSES)
    values = deepspeed_json(loaded, PROCESSES, "bf16").values
    assert values["train_micro_batch_size_per_gpu"] == 2
    assert values["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
