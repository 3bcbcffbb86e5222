"""The table of settings that do not combine: every rule is broken once here, and its error says how to mend it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.config.io.fields import lookup
from drawbar.config.io.load_config import ALTERNATIVES, load_config
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules, check_world, resolve_micro_batch
from drawbar.config.schema.run_config import DataSection, ParallelSection, RunConfig, TrainSection
from drawbar.errors import ExitCode, UserError

TRAINABLE = ["data.train=a.txt", "train.steps=100"]
"""The least that training needs."""

OTHER_TASKS = ["seq2seq", "masked_lm", "sequence_classification", "token_classification"]

BREAKING = {
    "reshard and replicate": [["parallel.reshard=false"], ["parallel.strategy=ddp", "parallel.replicate=2"]],
    "reduce_dtype": [
        ["parallel.strategy=single", "parallel.reduce_dtype=bf16"],
        ["parallel.strategy=ddp", "parallel.tensor=2", "parallel.reduce_dtype=bf16"],
        ["deepspeed.preset=zero2", "parallel.reduce_dtype=bf16"],
    ],
    "offload": [["parallel.offload=true"], ["parallel.strategy=ddp", "parallel.offload=true"]],
    "zero_stage": [["parallel.zero_stage=0"]],
    "single with several processes": [["parallel.strategy=single", "launch.nproc=2"]],
    "dp with several processes": [["parallel.strategy=dp", "launch.nproc=2"]],
    "dp without CUDA": [["parallel.strategy=dp", "device=cpu"], ["parallel.strategy=dp", "device=mps"]],
    "dp with state of a forward": [
        ["parallel.strategy=dp", "task={type: preference, model: m}"],
        ["parallel.strategy=dp", "task={type: reward, model: m}"],
        ["parallel.strategy=dp", "task.embedding_noise=5"],
    ],
    "dp with packed rows": [["parallel.strategy=dp", "data.batching=packed"]],
    "one process with model parallelism": [
        ["parallel.strategy=single", "parallel.tensor=2"],
        ["parallel.strategy=single", "parallel.pipeline=2"],
        ["parallel.strategy=dp", "parallel.context=2"],
    ],
    "zero1 with model parallelism": [
        ["parallel.strategy=zero1", "parallel.tensor=2"],
        ["parallel.strategy=zero1", "parallel.pipeline=2"],
    ],
    "adafactor with sharded parameters": [
        ["optim.name=adafactor", "parallel.strategy=fsdp"],
        ["optim.name=adafactor", "parallel.tensor=2"],
    ],
    "mps with several processes": [["device=mps", "launch.nproc=2"]],
    "mps with model parallelism": [["device=mps", "parallel.tensor=2"]],
    "sequence": [["parallel.sequence=true"]],
    "schedule and cuts": [["parallel.schedule=gpipe"], ["parallel.cuts=[1, 1]"]],
    "pipeline of other tasks": [[f"task={{type: {task}, model: m}}", "parallel.pipeline=2"] for task in OTHER_TASKS],
    "embedding noise in a split model": [
        ["task.embedding_noise=5", f"parallel.{name}=2"] for name in ("tensor", "pipeline", "context")
    ],
    "context on other devices": [["parallel.context=2", "device=cpu"]],
    "context of other tasks": [[f"task={{type: {task}, model: m}}", "parallel.context=2"] for task in OTHER_TASKS],
    "context with packed rows": [["parallel.context=2", "data.batching=packed"]],
    "context with pipeline": [["parallel.context=2", "parallel.pipeline=2"]],
    "compiled tensor-parallel blocks that are computed again as a whole": [
        ["parallel.tensor=2", "parallel.compile=true", f"parallel.activation_checkpointing={what}"]
        for what in ("full", "{every: 2}")
    ],
    "sequence and activation checkpointing in a pipeline": [
        [
            *("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"),
            "parallel.activation_checkpointing=full",
        ]
    ],
    "context with sequence": [["parallel.context=2", "parallel.tensor=2", "parallel.sequence=true"]],
    "context with other attention": [["parallel.context=2", "task.attention=eager"]],
    "flash attention without CUDA": [["task.attention=flash_attention_2", "device=cpu"]],
    "flash attention in fp32": [["task.attention=kernels-community/flash-attn2", "precision=fp32"]],
    "liger-kernel without CUDA": [["task.cross_entropy=liger", "device=cpu"]],
    "liger-kernel in fp16": [["task.cross_entropy=liger", "precision=fp16"]],
    "liger-kernel with tensor": [["task.cross_entropy=liger", "parallel.tensor=2"]],
    "check_replicas": [["parallel.check_replicas=10", f"parallel.strategy={name}"] for name in ("single", "dp")],
    "on_spike": [[f"train.on_spike={does}", "parallel.strategy=deepspeed"] for does in ("skip", "rewind", "stop")],
    "fp8 on other devices": [["parallel.fp8=rowwise", "device=cpu"], ["parallel.fp8=tensorwise", "device=mps"]],
    "fp8 in other precisions": [[f"precision={name}", "parallel.fp8=rowwise"] for name in ("fp32", "fp16")],
    "fp8 with other strategies": [
        ["parallel.fp8=rowwise", "parallel.strategy=dp"],
        ["parallel.fp8=rowwise", "parallel.strategy=deepspeed"],
        ["parallel.fp8=rowwise", "deepspeed={}"],
    ],
    "fp8 with model parallelism": [
        ["parallel.fp8=rowwise", f"parallel.{degree}=2"] for degree in ("tensor", "pipeline", "context")
    ],
    "fp8 with adapters": [["parallel.fp8=rowwise", "lora={rank: 16}", "task.model=gpt2"]],
    "flex attention on the CPU": [["task.attention=flex_attention", "device=cpu"]],
    "training data": [["data.train=null"], ["data.train=[]"]],
    "steps and epochs": [["train.epochs=0.5"]],
    "steps or epochs": [["train.steps=null"]],
    "micro-batch": [
        ["train.global_batch=8", "train.micro_batch=3"],
        ["train.global_batch=8", "train.micro_batch=16"],
    ],
    "padding_free with dp": [["data.padding_free=true", "parallel.strategy=dp"]],
    "padding_free with context": [["data.padding_free=true", "parallel.context=2"]],
    "padding_free with compile": [
        ["data.padding_free=true", "parallel.compile=true", setting]
        for setting in ("device=cpu", "device=mps", "precision=fp32")
    ],
    "padding_free with compiled tensor parallelism": [
        ["data.padding_free=true", "parallel.compile=true", "parallel.tensor=2"]
    ],
    "padding_free with other attention": [["data.padding_free=true", "task.attention=eager"]],
    "micro-batch twice": [["train.micro_batch=2", "train.micro_batch_tokens=99"]],
    "profile": [["tracking.profile={start: 101}"]],
    "epochs of a stream": [["data.streaming=true", "train.steps=null", "train.epochs=1.0"]],
    "grouped stream": [["data.streaming=true", "data.batching=grouped"]],
    "shuffling within lanes": [["data.streaming=true", "data.shuffle_buffer=700"]],
    "weights without shuffling": [
        ["data.train=[{files: a, weight: 1.0}, {files: b, weight: 2}]", "data.shuffle=false"]
    ],
    "settings of deepspeed": [["parallel.strategy=ddp", "deepspeed={}"]],
    "preset and stage": [["deepspeed.preset=zero2", "parallel.zero_stage=3"]],
    "preset and offload": [["deepspeed.preset=zero2", "parallel.offload=true"]],
    "offload and none": [
        ["deepspeed={preset: zero3_offload, offload_optimizer: none}"],
        ["deepspeed.offload_optimizer=none", "parallel.offload=true"],
    ],
    "offloaded parameters below stage 3": [["deepspeed={preset: zero2, offload_parameters: cpu}"]],
    "offload of stage 0": [["parallel.strategy=deepspeed", "parallel.zero_stage=0", "parallel.offload=true"]],
    "offload to disk below stage 3": [["deepspeed={preset: zero2, offload_optimizer: /disk}"]],
    "zero stage of a pipeline": [
        ["parallel.strategy=deepspeed", "parallel.pipeline=2", "parallel.zero_stage=2"],
        ["deepspeed.preset=zero3", "parallel.pipeline=2"],
    ],
    "tensor with stage 3": [["deepspeed.preset=zero3", "parallel.tensor=2"]],
    "deepspeed tensor with adapters": [["deepspeed={}", "parallel.tensor=2", "lora={rank: 2}", "task.model=x"]],
    "fp16 with stage 0": [["deepspeed={}", "parallel.zero_stage=0", "precision=fp16"]],
    "deepspeed in fp16 on CPUs": [["deepspeed={}", "device=cpu", "precision=fp16"]],
    "deepspeed with other schedules": [["deepspeed={}", "parallel.pipeline=2", "parallel.schedule=interleaved"]],
    "deepspeed with sequence": [["deepspeed={}", "parallel.tensor=2", "parallel.sequence=true"]],
    "deepspeed with context": [["deepspeed={}", "parallel.context=2"]],
    "muon with deepspeed": [["deepspeed={}", "optim.name=muon"], ["parallel.strategy=deepspeed", "optim.name=muon"]],
    "options of optimizers": [["optim.options={betas: [0.8, 0.9]}"]],
    "other optimizers with deepspeed": [["deepspeed={}", "optim.name=torch.optim:RAdam"]],
    "ema with deepspeed": [["deepspeed={}", "optim.ema=0.99"]],
    "moments in 8 bits in shards": [
        ["optim.state_dtype=int8", setting] for setting in ("parallel.strategy=fsdp", "parallel.tensor=2")
    ],
    "state_dtype with deepspeed": [["deepspeed={}", "optim.state_dtype=bf16"]],
    "adafactor with deepspeed": [["deepspeed={}", "optim.name=adafactor", "parallel.zero_stage=0"]],
    "deepspeed on mps": [["deepspeed={}", "device=mps"]],
    "compile with stage 3": [["deepspeed.preset=zero3", "parallel.compile=true"]],
    "adapters of a model from scratch": [["lora={}", "task.from_scratch={}"]],
    "a packed base that is sharded": [
        [f"lora.base={base}", "task.model=gpt2", setting]
        for base, setting in (
            ("nf4", "parallel.strategy=fsdp"),
            ("int8", "parallel.tensor=2"),
            ("bf16", "parallel.pipeline=2"),
            ("nf4", "deepspeed.preset=zero2"),
            ("nf4", "parallel.strategy=dp"),
        )
    ],
    "DoRA with split or copied layers": [
        ["lora.dora=true", "task.model=gpt2", setting]
        for setting in ("parallel.tensor=2", "deepspeed.preset=zero2", "parallel.strategy=dp")
    ],
    "adapters and new embeddings": [["lora={rank: 2}", "task.resize_embeddings=true"]],
    "evaluation without data": [["eval.every=5"], ["eval.at_start=true"], ["eval.every=1", "eval.patience=2"]],
    "names of training data": [["data.train={name: a, files: b.txt}"], ["data.train=[a.txt, {name: a, files: b.txt}]"]],
    "patience": [["data.validation=b.txt", "eval.patience=2"]],
    "muon_precision": [["optim.muon_precision=fp32"], ["optim.name=sgd", "optim.muon_precision=bf16"]],
    "warm-up": [["optim.warmup=100"], ["optim.schedule=wsd", "optim.warmup=200"]],
    "warm-up and decay": [
        ["optim.schedule=wsd", "optim.warmup=0.5", "optim.decay=0.6"],
        ["optim.schedule=wsd", "optim.warmup=50", "optim.decay=0.6"],
    ],
    "momentum": [["optim.momentum=0.9"], ["optim.name=adafactor", "optim.momentum=0.0"]],
    "state_dtype": [["optim.name=sgd", "optim.state_dtype=bf16"], ["optim.name=muon", "optim.state_dtype=bf16"]],
    "frozen parameters under adapters": [["lora.rank=4", "optim.groups=[{match: embed, frozen: true}]"]],
    "frozen parameters with a learning rate": [["optim.groups=[{match: embed, frozen: true, lr: 0.1}]"]],
    "learning rates of groups": [["optim.lr=0", "optim.groups=[{match: embed, lr: 0.1}]"]],
    "betas and eps": [["optim.name=sgd", "optim.betas=[0.8, 0.9]"], ["optim.name=adafactor", "optim.eps=1e-6"]],
    "min_lr_ratio": [["optim.schedule=constant", "optim.min_lr_ratio=0.1"]],
    "decay": [["optim.decay=0.2"]],
    "power": [["optim.power=2.0"]],
}

WORKING = [
    ["train.steps=null", "train.epochs=0.5", "optim.warmup=0.05"],
    ["train.steps=null", "train.epochs=1.0", "optim.warmup=500"],
    ["train.global_batch=8", "train.micro_batch=8", "launch.nproc=2", "parallel.strategy=ddp"],
    ["parallel.strategy=single", "launch.nproc=1", "device=mps", "precision=fp16"],
    ["data.validation=b.txt", "eval.every=5", "eval.patience=2", "eval.at_start=true"],
    ["optim.schedule=wsd", "optim.warmup=0.5", "optim.decay=0.5", "optim.min_lr_ratio=0.1"],
    ["optim.warmup=99", "checkpoint.every=null", "tracking.profile={start: 100}"],
    ["optim.name=sgd", "optim.momentum=0.9"],
    ["data.validation_share=0.1", "eval.every=5"],
    ["data.streaming=true", "data.batching=packed", "train.micro_batch_tokens=4096"],
    ["data.train=[a, {files: b}]", "data.shuffle=false"],
    ["lora={rank: 2}", "task.model=gpt2"],
    *(["lora.base=nf4", "task.model=gpt2", f"parallel.strategy={name}"] for name in ("auto", "single", "ddp", "zero1")),
    ["lora.base=fp32", "task.model=gpt2", "parallel.strategy=fsdp", "precision=bf16"],
    ["lora.dora=true", "task.model=gpt2", "parallel.strategy=fsdp", "parallel.pipeline=2"],
    ["optim.name=muon", "optim.momentum=0.95", "optim.betas=[0.8, 0.9]"],
    ["optim.schedule=polynomial", "optim.power=2.0"],
    ["parallel.strategy=fsdp", "parallel.tensor=2", "parallel.pipeline=2", "optim.name=muon", "lora={rank: 2}"],
    ["parallel.strategy=fsdp", "parallel.tensor=2", "parallel.pipeline=2", "optim.state_dtype=bf16"],
    ["parallel.strategy=ddp", "parallel.pipeline=2", "optim.state_dtype=int8", "optim.ema=0.9"],
    ["parallel.strategy=zero1", "optim.state_dtype=int8", "optim.layer_lr_decay=0.9"],
    ["parallel.strategy=zero1", "optim.name=adafactor", "data.batching=packed"],
    ["parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.cuts=[1, 1, 1, 1]", "optim.name=adafactor"],
    ["parallel.context=2", "parallel.strategy=fsdp", "parallel.tensor=2", "device=cuda", "task.attention=sdpa"],
    ["parallel.tensor=2", "parallel.sequence=true", "task={type: seq2seq, model: m}"],
    ["parallel.strategy=dp", "lora={rank: 2}", "device=cuda"],
    ["task.attention=flash_attention_2", "precision=bf16", "device=cuda"],
    ["parallel.strategy=deepspeed", "parallel.tensor=2", "parallel.pipeline=2", "lora={rank: 2}"],
    ["deepspeed={preset: zero3_offload, offload_parameters: /disk}", "data.batching=packed"],
    ["deepspeed.preset=zero2_offload", "parallel.offload=true", "parallel.zero_stage=2", "parallel.strategy=deepspeed"],
    ["parallel.strategy=deepspeed", "parallel.zero_stage=0", "optim.name=sgd", "parallel.compile=true"],
    *(["parallel.fp8=rowwise", f"parallel.strategy={name}"] for name in ("auto", "single", "ddp", "zero1", "fsdp")),
    ["parallel.fp8=tensorwise", "precision=bf16", "device=cuda", "parallel.compile=true", "data.batching=packed"],
    ["parallel.compile=true", "parallel.activation_checkpointing={every: 2}", "parallel.strategy=zero1"],
]


def broken_rules(overrides: list[str]) -> list[str]:
    config = load_config(None, TRAINABLE + overrides).config
    return [rule.name for rule in RULES + TRAIN_RULES if rule.broken(config)]


def test_names_are_unique_and_every_rule_is_tried():
    names = [rule.name for rule in RULES + TRAIN_RULES]
    assert len(names) == len(set(names))
    assert set(names) == set(BREAKING)


@pytest.mark.parametrize(("name", "overrides"), [(name, case) for name, cases in BREAKING.items() for case in cases])
def test_rule_refuses_and_explains(name, overrides):
    assert name in broken_rules(overrides)
    rule = next(rule for rule in RULES + TRAIN_RULES if rule.name == name)
    with pytest.raises(UserError) as caught:
        check_rules(load_config(None, TRAINABLE + overrides), RULES + TRAIN_RULES)
    text = str(caught.value)
    assert rule.reason in text
    assert rule.remedy in text
    assert all(f"{key}=" in text for key in rule.keys)
    assert caught.value.exit_code == ExitCode.WRONG_REQUEST


@pytest.mark.parametrize("overrides", WORKING)
def test_what_works_is_left_alone(overrides):
    assert broken_rules(overrides) == []
    check_rules(load_config(None, TRAINABLE + overrides), RULES + TRAIN_RULES)


def test_evaluation_needs_neither_training_data_nor_steps():
    check_rules(RunConfig())
    with pytest.raises(UserError, match="it is unknown how long to train"):
        check_rules(RunConfig(), TRAIN_RULES)


def test_error_names_values_and_origins(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("data: {train: a.txt}\ntrain:\n  steps: 10\n  epochs: 2\n")
    with pytest.raises(UserError) as caught:
        check_rules(load_config(path, ["eval.every=5"]), RULES + TRAIN_RULES)
    text = str(caught.value)
    assert f"train.steps=10 ({path}:3), train.epochs=2.0 ({path}:4): both set how long to train" in text
    assert "eval.every=5 (command line), eval.patience=null (default)" in text


def test_what_can_be_said_in_two_ways_is_known_to_the_command_line():
    """Every rule of that kind; the sources of records are checked where they are read."""
    of_rules = {rule.keys for rule in RULES + TRAIN_RULES if rule.reason.startswith("both say")}
    assert of_rules <= set(ALTERNATIVES)


@pytest.mark.parametrize(
    ("text", "overrides", "kept", "note"),
    [
        ("train: {epochs: 3}", ["train.steps=20"], {"train.steps": 20, "train.epochs": None}, "train.epochs=3"),
        ("train: {steps: 3}", ["train={epochs: 2}"], {"train.steps": None, "train.epochs": 2.0}, "train.steps=3"),
        (
            "train: {micro_batch_tokens: 512}",
            ["train.micro_batch=4"],
            {"train.micro_batch": 4, "train.micro_batch_tokens": None},
            "train.micro_batch_tokens=512",
        ),
        (
            "train: {micro_batch: 4}",
            ["train.micro_batch_tokens=512"],
            {"train.micro_batch": "auto", "train.micro_batch_tokens": 512},
            "train.micro_batch=4",
        ),
        (
            "data: {validation_share: 0.1}",
            ["data.validation=v.txt"],
            {"data.validation": "v.txt", "data.validation_share": None},
            "data.validation_share=0.1",
        ),
        (
            "data: {validation: {files: [v.txt], reader: .txt}}",
            ["data.validation_share=0.1"],
            {"data.validation": None, "data.validation_share": 0.1},
            "data.validation=",
        ),
        (
            "data: {train: {files: a.txt}}",
            ["data.train.dataset=imdb"],
            {"data.train.dataset": "imdb", "data.train.files": None},
            "data.train.files=a.txt",
        ),
    ],
)
def test_the_command_line_takes_the_place_of_what_a_file_says_in_another_way(tmp_path, text, overrides, kept, note):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    loaded = load_config(path, overrides)
    assert {key: lookup(loaded.config, key) for key in kept} == kept
    (said,) = loaded.notes
    assert "(command line) takes the place of " + note in said
    assert f"({path}:" in said
    assert not any(key.startswith(note.partition("=")[0] + ".") for key in loaded.origins)


@pytest.mark.parametrize("override", ["train.steps=null", "optim.lr=0.1", "train.micro_batch=auto"])
def test_what_chooses_nothing_replaces_nothing(tmp_path, override):
    path = tmp_path / "config.yaml"
    path.write_text("train: {epochs: 3, micro_batch_tokens: 512}")
    loaded = load_config(path, [override])
    assert (loaded.config.train.epochs, loaded.config.train.micro_batch_tokens, loaded.notes) == (3.0, 512, ())


def test_two_ways_in_one_place_are_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train: {epochs: 3}")
    loaded = load_config(path, ["data.train=a", "train.epochs=2", "train.steps=5"])
    assert loaded.notes == ()
    with pytest.raises(UserError, match="both set how long to train"):
        check_rules(loaded, TRAIN_RULES)


def test_error_names_the_origin_of_a_section(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("task: {model: llama, from_scratch: {hidden_size: 8}}\n")
    with pytest.raises(UserError) as caught:
        check_rules(load_config(path, ["lora.rank=4"]))
    assert re.search(r"lora=\{.*\} \(command line\), task.from_scratch=", str(caught.value))


def test_a_single_problem_has_its_remedy_apart():
    config = RunConfig(data=DataSection(train="a"), train=TrainSection(steps=1, epochs=1.0))
    with pytest.raises(UserError) as caught:
        check_rules(config, TRAIN_RULES)
    assert caught.value.what == "train.steps=1, train.epochs=1.0: both set how long to train"
    assert caught.value.remedy == "keep one, and set the other to null"


def run_with(global_batch: int, micro_batch: int | str = "auto", sequence_length: int = 512) -> RunConfig:
    return RunConfig(
        data=DataSection(sequence_length=sequence_length),
        train=TrainSection(global_batch=global_batch, micro_batch=micro_batch),
    )


def test_global_batch_that_cannot_be_split():
    with pytest.raises(UserError) as caught:
        check_world(run_with(30), 4)
    assert "train.global_batch=30 cannot be split evenly over 4 processes" in str(caught.value)
    assert "set train.global_batch to 28 or 32, or start 2, 3, 5 or 6 processes" in str(caught.value)
    with pytest.raises(UserError, match=r"set train\.global_batch to 4, or start 1 or 3 processes"):
        check_world(run_with(3), 4)


def test_micro_batch_that_does_not_divide_the_share():
    check_world(run_with(32, 8), 4)
    with pytest.raises(UserError) as caught:
        check_world(run_with(32, 16), 4)
    assert "does not divide the 8 rows that each process gets" in str(caught.value)
    assert "set train.micro_batch to 1, 2, 4 or 8, or to auto" in str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])
def test_lanes_of_a_stream_divide_by_every_usual_world(world_size):
    config = run_with(384)
    check_world(config.model_copy(update={"data": DataSection(streaming=True)}), world_size)


def test_lanes_that_cannot_be_split():
    data = DataSection(streaming=True, stream_lanes=48)
    with pytest.raises(UserError) as caught:
        check_world(run_with(64).model_copy(update={"data": data}), 64)
    assert caught.value.where == "data.stream_lanes"
    assert "data.stream_lanes=48 cannot be split evenly over 64 processes" in str(caught.value)
    assert "start 12, 16, 24 or 48 processes; or set data.stream_lanes=192, in a new run or a fork" in str(caught.value)
    placed = {"data": data, "parallel": ParallelSection(tensor=4)}
    check_world(run_with(64).model_copy(update=placed), 64)  # 16 data-parallel ranks
    check_world(run_with(64).model_copy(update={"data": DataSection(stream_lanes=48)}), 64)  # no stream


@pytest.mark.parametrize(
    ("config", "world_size", "rows"),
    [
        (run_with(64), 1, 16),  # 16 × 512 = 8192
        (run_with(64), 8, 8),
        (run_with(24), 1, 12),  # 16 would fit, but does not divide 24
        (run_with(7, sequence_length=2048), 1, 1),
        (run_with(4, sequence_length=16384), 1, 1),
        (run_with(64, micro_batch=2), 1, 2),
        (run_with(1), 2, 1),
    ],
)
def test_micro_batch_of_auto(config, world_size, rows):
    assert resolve_micro_batch(config, world_size) == rows


@settings(deadline=None)
@given(share=st.integers(1, 200), world_size=st.integers(1, 16), sequence_length=st.integers(2, 20_000))
def test_auto_always_fits_the_world(share, world_size, sequence_length):
    config = run_with(share * world_size, sequence_length=sequence_length)
    rows = resolve_micro_batch(config, world_size)
    check_world(run_with(share * world_size, rows), world_size)
    assert rows == 1 or rows * sequence_length <= 8192
    larger = [r for r in range(rows + 1, share + 1) if share % r == 0]
    assert all(r * sequence_length > 8192 for r in larger)
