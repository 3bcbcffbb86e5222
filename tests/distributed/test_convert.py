"""``drawbar convert``: what other programs have saved goes on here, and what is saved here goes on there.

torch's FSDP with its distributed checkpoint, DeepSpeed's engine and Hugging Face's Trainer are the real ones; every
tensor is compared bit by bit.
"""

import io
import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drawbar
from drawbar.checkpoint import CheckpointDirectory, read
from drawbar.commands.conversion.convert_run import convert_run
from drawbar.commands.conversion.import_run import import_run
from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from harness import run_cli, run_ranks
from runs import fit_in, losses
from tiny import ARCHITECTURES, CPU, LENGTH, VOCABULARY, Numbers

State = dict[str, torch.Tensor]
ROWS, LR, DECAY = 4, 1e-2, 0.1


def write_project(folder: Path, *, family: str = "llama", tied: bool = True) -> None:
    """A configuration of :class:`Numbers`, and its data: rows of numbers, all of one length."""
    generator = torch.Generator().manual_seed(3)
    for name, count in (("train", 10 * ROWS), ("valid", ROWS)):
        rows = torch.randint(VOCABULARY, (count, LENGTH), generator=generator).tolist()
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": "x", "tokens": row, "context": 0}) + "\n" for row in rows)
        )
    values = {
        "run": {"name": "here"},
        "task": {"model": family, "from_scratch": {**ARCHITECTURES[family], "tie_word_embeddings": tied}},
        "data": {"train": "train.jsonl", "validation": "valid.jsonl", "sequence_length": LENGTH, "shuffle": False},
        "train": {"global_batch": ROWS, "steps": 6},
        "optim": {"lr": LR, "weight_decay": DECAY, "warmup": 2, "schedule": "linear"},
        "precision": "fp32",
        "device": "cpu",
        "eval": {"every": 6},
        "checkpoint": {"every": 3},
        "tracking": {"log_every": 1, "tensorboard": False},
    }
    (folder / "config.yaml").write_text(json.dumps(values))


def configuration(folder: Path, *settings: str) -> RunConfig:
    with chdir(folder):
        return drawbar.load_config("config.yaml", settings, Numbers.Config).config


def take_over(folder: Path, source: Path, form: str, *settings: str) -> RunConfig:
    """``drawbar convert SOURCE --from FORM --to-run config.yaml SETTINGS``, in this process."""
    config = configuration(folder, *settings)
    with chdir(folder):
        assert import_run(source, form, config, Numbers) == 3
    return config


def saved_state(run: Path, step: int = 3) -> tuple[State, State]:
    snapshot = read(CheckpointDirectory(run / "checkpoints").resolve(str(step)))
    return dict(snapshot.model), dict(snapshot.optimizer)


def check_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, different
    assert {found[name].dtype for name in found} <= {torch.float32}


def sent(result: Any) -> bytes:
    """For the pipe from a rank: tensors themselves would be sent as handles, which end with the rank."""
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def from_first(function: Any, *arguments: Any) -> Any:
    results = run_ranks(function, 2, *arguments, env={"DS_ACCELERATOR": "cpu"})
    return torch.load(io.BytesIO(results[0]))


# what runs on ranks without drawbar: a model of transformers, with torch's or DeepSpeed's optimizer


def peer_model(fields: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **fields))


def peer_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def peer_batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(step))


def fsdp_model(fields: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = peer_model(fields)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(peer_groups(model), lr=LR)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    return weights, {f"{name}/{key}": value for name, of in state.get("state", {}).items() for key, value in of.items()}


def save_with_fsdp(folder: str, fields: dict[str, Any]) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = fsdp_model(fields)
    for step in range(3):
        model(input_ids=peer_batch(step), labels=peer_batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": state}, "epoch": 7}, checkpoint_id=folder)
    return sent(full_state(model, optimizer))


def load_with_fsdp(folder: str, fields: dict[str, Any]) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = fsdp_model(fields)
    weights, state = get_state_dict(model, optimizer)
    tree = {"model": weights, "optimizer": state}
    dcp.load(tree, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])
    groups = [{"size": len(group["params"]), **group} for group in optimizer.param_groups]
    for group in groups:
        del group["params"]
    return sent((*full_state(model, optimizer), groups))


def deepspeed_engine(stage: int, fields: dict[str, Any], universal: bool = False) -> Any:
    import torch.distributed as dist

    from drawbar.parallel.deepspeed.deepspeed_state import import_deepspeed

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = peer_model(fields)
    values = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(peer_groups(model), lr=LR)
    return import_deepspeed(CPU).initialize(model=model, optimizer=optimizer, config=values)[0]


def deepspeed_state(engine: Any) -> tuple[State, State]:
    """Gathered from the engine's own memory; every rank calls it."""
    from drawbar.parallel.deepspeed.deepspeed_state import MasterState

    memory, parameters = MasterState.of(engine), dict(engine.module.named_parameters())
    weights = {name: memory.weight(parameter).clone() for name, parameter in parameters.items()}
    keys = ("exp_avg", "exp_avg_sq")
    return weights, {f"{name}/{key}": memory.state(p, key).clone() for name, p in parameters.items() for key in keys}


def save_with_deepspeed(folder: str, stages: tuple[int, ...], fields: dict[str, Any]) -> Any:
    saved = []
    for stage in stages:
        engine = deepspeed_engine(stage, fields)
        for step in range(3):
            engine.backward(engine(input_ids=peer_batch(step), labels=peer_batch(step)).loss)
            engine.step()
        engine.save_checkpoint(f"{folder}/zero{stage}")
        saved.append(deepspeed_state(engine))
    return sent(saved)


def load_with_deepspeed(folder: str, stages: tuple[int, ...], fields: dict[str, Any]) -> Any:
    loaded = []
    for stage in stages:
        engine = deepspeed_engine(stage, fields, universal=True)
        assert engine.load_checkpoint(folder)[0] is not None
        inner = engine.optimizer.optimizer
        steps = {int(state["step"]) for state in inner.state.values()}
        decays = [group["weight_decay"] for group in inner.param_groups]
        loaded.append((*deepspeed_state(engine), engine.global_steps, steps, decays))
    return sent(loaded)


@pytest.fixture
def fields() -> dict[str, Any]:
    return {**ARCHITECTURES["llama"], "tie_word_embeddings": True}


def test_a_dcp_folder_of_fsdp_becomes_a_run_and_goes_back(tmp_path: Path, fields: dict[str, Any]) -> None:
    write_project(tmp_path)
    weights, state = from_first(save_with_fsdp, str(tmp_path / "theirs"), fields)
    take_over(tmp_path, tmp_path / "theirs", "dcp")
    run = tmp_path / "runs" / "here"
    found = saved_state(run)
    check_equal(found[0], weights)
    check_equal(found[1], state)

    fit_in(tmp_path, task=Numbers)  # goes on
    assert list(losses(run)) == [4, 5, 6]
    with chdir(tmp_path):
        convert_run(configuration(tmp_path), Numbers, "latest", "dcp", tmp_path / "ours")
    weights, state, groups = from_first(load_with_fsdp, str(tmp_path / "ours"), fields)
    found = saved_state(run, 6)
    check_equal(found[0], weights)
    check_equal(found[1], state)
    assert [group["weight_decay"] for group in groups] == [DECAY, 0.0]
    with chdir(tmp_path):
        assert import_run(tmp_path / "ours", "dcp", configuration(tmp_path, "run.name=back"), Numbers) == 6
    for ours, again in zip(saved_state(run, 6), saved_state(tmp_path / "runs" / "back", 6), strict=True):
        check_equal(again, ours)


def test_deepspeed_folders_become_runs_and_go_back(tmp_path: Path, fields: dict[str, Any]) -> None:
    write_project(tmp_path)
    stages = (1, 2, 3)
    saved = from_first(save_with_deepspeed, str(tmp_path), stages, fields)
    for stage, (weights, state) in zip(stages, saved, strict=True):
        take_over(tmp_path, tmp_path / f"zero{stage}", "deepspeed", f"run.name=of{stage}")
        model, optimizer = saved_state(tmp_path / "runs" / f"of{stage}")
        check_equal({name: model[name] for name in weights}, weights)
        assert model.keys() - weights.keys() == {"lm_head.weight"}  # which is tied
        assert model["lm_head.weight"].equal(model["model.embed_tokens.weight"])
        check_equal({name: tensor for name, tensor in optimizer.items() if not name.endswith("/step")}, state)
        assert {float(tensor) for name, tensor in optimizer.items() if name.endswith("/step")} == {3.0}
    assert not list((tmp_path / "runs").glob(".convert*"))

    with chdir(tmp_path):
        convert_run(configuration(tmp_path, "run.name=of2"), Numbers, "3", "deepspeed", tmp_path / "ours")
    loaded = from_first(load_with_deepspeed, str(tmp_path / "ours"), (2, 3), fields)
    for weights, state, global_steps, steps, decays in loaded:
        check_equal(weights, saved[1][0])
        check_equal(state, saved[1][1])
        assert (global_steps, steps, decays) == (3, {3}, [DECAY, 0.0])


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_goes_on_from_a_trainers_checkpoint_as_the_trainer_does(tmp_path: Path, tied: bool) -> None:
    from transformers import Trainer, TrainingArguments

    class Recorded(Trainer):
        losses: list[float] = []

        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*args, **options)
            self.losses.append(loss.item())
            return loss

    write_project(tmp_path, tied=tied)
    rows = [json.loads(line)["tokens"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        max_steps=6,
        save_steps=3,
        learning_rate=LR,
        weight_decay=DECAY,
        warmup_steps=2,
        lr_scheduler_type="linear",
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
    )
    samples = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]  # Trainer counts the labels unshifted
    model = peer_model({**ARCHITECTURES["llama"], "tie_word_embeddings": tied})
    trainer = Recorded(model, arguments, train_dataset=samples)
    trainer.losses = []
    trainer.train()

    source = tmp_path / "out" / "checkpoint-3"
    take_over(tmp_path, source, "trainer")
    model_found, optimizer = saved_state(tmp_path / "runs" / "here")
    check_trainer_state(model_found, optimizer, source)
    other = ("run.name=other", "task.from_scratch.num_attention_heads=2", "task.from_scratch.num_key_value_heads=1")
    with pytest.raises(UserError, match="num_attention_heads is 4 there, and 2 here"):
        take_over(tmp_path, source, "trainer", *other, "task.from_scratch.head_dim=8")
    fit_in(tmp_path, task=Numbers)
    run = losses(tmp_path / "runs" / "here")
    assert list(run) == [4, 5, 6]
    assert list(run.values()) == pytest.approx(trainer.losses[3:], rel=1e-5)
    final = dict(trainer.model.state_dict())
    for name, tensor in saved_state(tmp_path / "runs" / "here", 6)[0].items():
        torch.testing.assert_close(tensor, final[name], rtol=1e-4, atol=1e-5)


def check_trainer_state(model: State, optimizer: State, source: Path) -> None:
    """Compare with the Trainer's files, whose parameters are matched by their moments' values alone."""
    from safetensors.torch import load_file

    stored = load_file(source / "model.safetensors")
    check_equal({name: model[name] for name in stored}, stored)
    moments = torch.load(source / "optimizer.pt", weights_only=True)["state"].values()
    ours = sorted(float(tensor.double().sum()) for name, tensor in optimizer.items() if name.endswith("exp_avg"))
    assert ours == sorted(float(values["exp_avg"].double().sum()) for values in moments)


@pytest.mark.parametrize("to", ["parts", "whole"])
def test_a_checkpoint_in_the_other_format_is_the_same_run(tmp_path: Path, to: str) -> None:
    write_project(tmp_path)
    first = "whole" if to == "parts" else "parts"
    fit_in(tmp_path, f"checkpoint.layout={first}", "train.steps=3", task=Numbers)
    folder = tmp_path / "copies" / "other"
    with chdir(tmp_path):
        assert convert_run(configuration(tmp_path), Numbers, "best", to, folder) == 3
    for ours, other in zip(saved_state(tmp_path / "runs" / "here"), saved_state(folder), strict=True):
        check_equal(other, ours)
    assert (folder / "checkpoints" / "step-00000003" / "tensors.json").exists() == (to == "parts")
    done = run_cli("checkpoint", "verify", str(folder), cwd=tmp_path)
    assert done.code == 0, done.err
    fit_in(tmp_path, task=Numbers)
    fit_in(tmp_path, "run.dir=copies", "run.name=other", task=Numbers)
    assert losses(folder) == {step: loss for step, loss in losses(tmp_path / "runs" / "here").items() if step > 3}
