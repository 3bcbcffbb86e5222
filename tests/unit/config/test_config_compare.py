"""Which settings a resumed run may change, and how the others are shown."""

import pytest

from drawbar.config.io.compare import ABSENT, MAY_CHANGE, Difference, changed_records, differences, render_differences
from drawbar.config.io.fields import catalogue
from drawbar.config.io.load_config import load_config
from drawbar.config.schema.run_config import run_config_type
from drawbar.config.schema.task_sections import CausalLMConfig


def changed(*overrides: str, base: tuple[str, ...] = ()) -> list[Difference]:
    return differences(load_config(None, base).config, load_config(None, [*base, *overrides]).config)


def test_equal_configurations_have_no_differences():
    assert changed() == []


@pytest.mark.parametrize(
    "override",
    [
        "launch.nproc=2",
        "tracking.log_every=3",
        "tracking.profile={start: 3}",
        "device=cpu",
        "parallel.strategy=ddp",
        "deepspeed.preset=zero2",
        "train.micro_batch=4",
        "train.steps=9",
        "train.epochs=2.5",
        "checkpoint.every=7",
        "eval.every=7",
        "eval.at_start=true",
        "eval.patience=3",
        "eval.micro_batch=3",
        "run.dir=elsewhere",
        "run.name=other",
        "data.test=t.txt",
    ],
)
def test_what_may_change(override):
    assert changed(override) == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=0.1", Difference("optim.lr", 3e-4, 0.1)),
        ("run.seed=1", Difference("run.seed", 0, 1)),
        ("train.global_batch=64", Difference("train.global_batch", 32, 64)),
        ("precision=fp16", Difference("precision", "auto", "fp16")),
        ("data.train=[a, b]", Difference("data.train", None, ["a", "b"])),
        ("optim.betas=[0.9, 0.95]", Difference("optim.betas", [0.9, 0.999], [0.9, 0.95])),
        ("eval.metric=bits", Difference("eval.metric", "loss", "bits")),
        ("eval.mode=max", Difference("eval.mode", "auto", "max")),
        ("task.from_scratch={}", Difference("task.from_scratch", None, {})),
        (
            "task.tokenizer={train: byte_bpe}",
            Difference("task.tokenizer", None, {"train": "byte_bpe", "vocab_size": 4096}),
        ),
    ],
)
def test_what_may_not(override, expected):
    assert changed(override) == [expected]


def test_auto_is_as_the_run_began():
    assert changed("eval.mode=auto", base=("eval.mode=min",)) == []


def test_keys_inside_a_mapping_are_compared_one_by_one():
    found = changed("task.from_scratch.n_layer=3", "task.from_scratch.n_head=4", base=("task.from_scratch.n_layer=2",))
    assert found == [
        Difference("task.from_scratch.n_layer", 2, 3),
        Difference("task.from_scratch.n_head", ABSENT, 4),
    ]


@pytest.mark.parametrize(
    ("split", "base", "overrides", "expected"),
    [
        ("validation", ["data.validation=a"], ["data.limit.validation=10"], ["data.limit.validation"]),
        ("validation", ["data.validation=a"], ["data.validation=b"], ["data.validation"]),
        ("validation", ["data.validation=a"], ["data.validation={files: b}"], ["data.validation"]),
        ("validation", ["data.validation=a"], ["data.rename.text=b"], ["data.rename"]),
        ("validation", ["data.validation=a"], ["data.train=b", "data.test=b", "data.limit.test=1"], []),
        ("validation", ["data.validation=a"], ["eval.micro_batch=3", "data.workers=0", "launch.nproc=2"], []),
        ("validation", ["data.train=a", "data.validation_share=0.1"], ["data.limit.train=9"], ["data.limit.train"]),
        ("test", ["data.train=a"], ["data.test=b", "data.limit.test=10"], []),  # the run has none of its own
        ("test", ["data.test=a"], ["data.test=b"], ["data.test"]),
        ("train", ["data.train=a"], ["data.limit.train=10"], ["data.limit.train"]),
    ],
)
def test_which_settings_give_a_split_other_records(
    split: str, base: list[str], overrides: list[str], expected: list[str]
) -> None:
    run, other = (load_config(None, arguments).config for arguments in (base, [*base, *overrides]))
    assert changed_records(run, other, split) == expected


def test_everything_that_may_change_exists():
    assert set(MAY_CHANGE) <= set(catalogue(run_config_type(CausalLMConfig)))
    assert all(MAY_CHANGE.values())


def test_table_is_aligned():
    found = changed("optim.lr=0.1", "data.train=[a, b]", "data.batching=packed")
    assert render_differences(found).splitlines() == [
        "  setting        was     is now",
        '  data.train     null    ["a", "b"]',
        "  data.batching  padded  packed",
        "  optim.lr       0.0003  0.1",
    ]
