"""``drawbar convert``: weights that other programs have saved become models, and what is saved here goes on there.

torch's FSDP with its distributed checkpoint, DeepSpeed's engine and Hugging Face's Trainer are the real ones; every
tensor is compared bit by bit.
"""

import io
import json
from argparse import Namespace
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drawbar
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.read import read_snapshot
from drawbar.config.schema.run_config import RunConfig
from drawbar.convert.convert_run import convert_run, import_weights
from harness import run_ranks
from runs import fit_in
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


def first_weights(project: Path, model: Path) -> State:
    """The weights of a run that begins with a model's folder, and learns nothing."""
    name = f"from-{model.name}"
    settings = (f"run.name={name}", f"task.model={model}", "task.from_scratch=null", "train.steps=1", "optim.lr=0")
    fit_in(project, *settings, "optim.warmup=0", "eval.every=null", task=Numbers)
    return saved_state(project / "runs" / name, 1)[0]


def saved_state(run: Path, step: int = 3) -> tuple[State, State]:
    snapshot = read_snapshot(CheckpointDirectory(run / "checkpoints").resolve(str(step)))
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
    tree = {"model": weights, "optimizer": {"state": state["state"]}}
    dcp.load(tree, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=state)
    groups = [{"size": len(group["params"]), **group} for group in optimizer.param_groups]
    for group in groups:
        del group["params"]
    return sent((*full_state(model, optimizer), groups))


def deepspeed_engine(stage: int, fields: dict[str, Any], universal: bool = False) -> Any:
    import torch.distributed as dist

    from drawbar.deepspeed.state import import_deepspeed

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
    from drawbar.deepspeed.state import MasterState

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


@pytest.fixture
def shape(tmp_path: Path, fields: dict[str, Any]) -> str:
    """A folder that has the ``config.json`` of the peers' model, and nothing else."""
    folder = tmp_path / "shape"
    config = peer_model(fields).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def check_model(project: Path, model: Path, expected: State) -> None:
    """A run begins with these weights; ``lm_head.weight``, which is tied, may be left out of them."""
    found = first_weights(project, model)
    assert found["lm_head.weight"].equal(found["model.embed_tokens.weight"])
    check_equal(found, {"lm_head.weight": found["lm_head.weight"], **expected})


@pytest.mark.exhaustive
def test_weights_of_a_dcp_folder_become_a_model_and_a_run_goes_on_under_fsdp(
    tmp_path: Path, fields: dict[str, Any], shape: str
) -> None:
    write_project(tmp_path)
    weights, _ = from_first(save_with_fsdp, str(tmp_path / "theirs"), fields)
    import_weights(tmp_path / "theirs", "dcp", shape, tmp_path / "model")
    check_model(tmp_path, tmp_path / "model", weights)

    fit_in(tmp_path, task=Numbers)
    with chdir(tmp_path):
        convert_run(configuration(tmp_path), "latest", "dcp", tmp_path / "ours")
    weights, state, groups = from_first(load_with_fsdp, str(tmp_path / "ours"), fields)
    found = saved_state(tmp_path / "runs" / "here", 6)
    check_equal(found[0], weights)
    check_equal(found[1], state)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(LR, DECAY), (LR, 0.0)]
    import_weights(tmp_path / "ours", "dcp", shape, tmp_path / "back")
    check_model(tmp_path, tmp_path / "back", found[0])


@pytest.mark.exhaustive
def test_weights_of_deepspeed_folders_become_models(tmp_path: Path, fields: dict[str, Any], shape: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    write_project(tmp_path)
    stages = (1, 2, 3)
    saved = from_first(save_with_deepspeed, str(tmp_path), stages, fields)
    for stage, (weights, _) in zip(stages, saved, strict=True):
        import_weights(tmp_path / f"zero{stage}", "deepspeed", shape, tmp_path / f"of{stage}")
        check_model(tmp_path, tmp_path / f"of{stage}", weights)
        folder = tmp_path / f"zero{stage}" / "global_step3"
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        universal = tmp_path / f"universal{stage}"
        ds_to_universal.main(
            Namespace(input_folder=str(folder), output_folder=str(universal), inject_missing_state=True, **options)
        )
        import_weights(universal, "deepspeed", shape, tmp_path / f"of-universal{stage}")
        check_model(tmp_path, tmp_path / f"of-universal{stage}", weights)


@pytest.mark.exhaustive
def test_a_run_goes_on_under_deepspeed(tmp_path: Path, fields: dict[str, Any], shape: str) -> None:
    write_project(tmp_path)
    fit_in(tmp_path, "train.steps=3", task=Numbers)
    with chdir(tmp_path):
        convert_run(configuration(tmp_path), "3", "deepspeed", tmp_path / "ours")
    weights, state = saved_state(tmp_path / "runs" / "here")
    import_weights(tmp_path / "ours", "deepspeed", shape, tmp_path / "back")
    check_model(tmp_path, tmp_path / "back", weights)
    del weights["lm_head.weight"]  # which is tied
    state = {name: tensor for name, tensor in state.items() if not name.endswith("/step")}
    for found, moments, *rest in from_first(load_with_deepspeed, str(tmp_path / "ours"), (2, 3), fields):
        check_equal(found, weights)
        check_equal(moments, state)
        assert rest == [3, {3}, [DECAY, 0.0]]


@pytest.mark.exhaustive
def test_a_trainers_checkpoint_is_a_model_as_it_is(tmp_path: Path, fields: dict[str, Any]) -> None:
    from transformers import Trainer, TrainingArguments

    write_project(tmp_path)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), use_cpu=True, max_steps=1, save_steps=1, report_to="none", disable_tqdm=True
    )
    rows = [json.loads(line)["tokens"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    trainer = Trainer(peer_model(fields), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    check_model(tmp_path, tmp_path / "out" / "checkpoint-1", dict(trainer.model.state_dict()))
