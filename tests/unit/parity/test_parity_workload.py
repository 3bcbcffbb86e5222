"""What `drawbar parity` changes in a model: nothing is dropped, and as many blocks are left as were asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from drawbar.config.schema.run_config import CausalLMConfig, DataSection, LoraSection, ParallelSection
from drawbar.config.schema.task_sections import MaskedLMConfig, Seq2SeqConfig, TaskConfig
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.parallel.blocks import repeated_blocks
from drawbar.parity.recorder import train
from drawbar.parity.workload import Workload
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.masked_lm import MaskedLM
from drawbar.tasks.seq2seq import Seq2Seq
from drawbar.tasks.task import Task
from tiny import CPU, tiny_config

TOKENIZER = train_byte_bpe([], 257)
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 3}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(4))

    def forward(self, x_BLH: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BLH = block(x_BLH)
        return x_BLH


class Own(Task):
    def build_model(self) -> nn.Module:
        return Blocks()


class Flat(Task):
    def build_model(self) -> nn.Module:
        return nn.Linear(2, 2)


def build(kind: type[Task], task: TaskConfig, layers: int | None = None, **sections: Any) -> nn.Module:
    return build_engine(kind, task, layers, **sections).module


def build_engine(kind: type[Task], task: TaskConfig, layers: int | None = None, **sections: Any) -> Engine:
    config = tiny_config(**sections).model_copy(update={"task": task})
    workload = Workload(config, kind, steps=1, layers=layers, tokenizer=TOKENIZER)
    return workload.engine(config, Distributed(RankInfo(), CPU, 60))


def dropped(model: nn.Module) -> list[str]:
    """What would be drawn by chance, in every place that models keep it."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            found.append(name)
        found += [
            f"{name}.{key}"
            for key, value in vars(module).items()
            if "drop" in key and value.__class__ is float and value
        ]
    config = getattr(model, "config", None)
    return found + [
        key for key, value in vars(config or nn.Module).items() if "drop" in key and isinstance(value, float) and value
    ]


SCRATCH = {
    "gpt2": (CausalLM, CausalLMConfig(model="gpt2", from_scratch={"n_embd": 16, "n_layer": 3, "n_head": 2})),
    "llama": (CausalLM, CausalLMConfig(model="llama", from_scratch={**SMALL, "attention_dropout": 0.3})),
    "qwen3": (CausalLM, CausalLMConfig(model="qwen3", from_scratch={**SMALL, "num_key_value_heads": 2, "head_dim": 8})),
    "bert": (MaskedLM, MaskedLMConfig(model="bert", from_scratch=SMALL)),
    "t5": (
        Seq2Seq,
        Seq2SeqConfig(model="t5", from_scratch={"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 3, "num_heads": 2}),
    ),
    "bart": (
        Seq2Seq,
        Seq2SeqConfig(
            model="bart",
            from_scratch={
                "d_model": 16,
                "encoder_layers": 3,
                "decoder_layers": 3,
                "encoder_ffn_dim": 16,
                "decoder_ffn_dim": 16,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "attention_dropout": 0.1,
                "encoder_layerdrop": 0.1,
                "max_position_embeddings": 64,
            },
        ),
    ),
}


@pytest.mark.parametrize("family", SCRATCH)
def test_models_of_transformers(family: str) -> None:
    kind, task = SCRATCH[family]
    whole, fewer = build(kind, task), build(kind, task, layers=2)
    assert dropped(whole) == dropped(fewer) == []
    blocks = [[name for name, _ in repeated_blocks(model)] for model in (whole, fewer)]
    assert len(blocks[0]) == (6 if kind is Seq2Seq else 3)
    assert blocks[1] == [name for name in blocks[0] if not name.endswith("2")]
    assert getattr(fewer.config, "num_hidden_layers", 2) == 2
    whole.train()
    tokens = torch.arange(6)[None]
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens} if kind is Seq2Seq else {"input_ids": tokens}
    for model in (whole, fewer):
        torch.testing.assert_close(model(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)


def test_a_pretrained_model_keeps_its_first_blocks(tmp_path: Any) -> None:
    stored = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=257, max_position_embeddings=64))
    stored.save_pretrained(tmp_path)
    model = build(CausalLM, CausalLMConfig(model=str(tmp_path)), layers=1)
    names = {name for name, _ in model.named_parameters()}
    assert {"model.layers.0.mlp.up_proj.weight", "lm_head.weight"} <= names
    assert not any("layers.1." in name for name in names)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored.get_parameter(name))


def test_a_model_of_ones_own() -> None:
    whole, fewer = (build(Own, TaskConfig(), layers) for layers in (None, 3))
    assert (len(whole.blocks), len(fewer.blocks)) == (4, 3)
    assert dropped(whole) == []
    with pytest.raises(UserError, match=r"no nn\.ModuleList") as error:
        build(Flat, TaskConfig(), layers=1)
    assert error.value.remedy


def test_adapters_drop_nothing(tmp_path: Any) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=257, max_position_embeddings=64)).save_pretrained(tmp_path)
    model = build(CausalLM, CausalLMConfig(model=str(tmp_path)), lora=LoraSection(dropout=0.5))
    assert dropped(model) == []
    assert any("lora_A" in name for name, _ in model.named_parameters())


def test_the_task_is_one_of_the_users_class_as_it_stands() -> None:
    """Encoded data and strategies depend on the class, and a task's own methods call one another."""
    for kind, section in (SCRATCH["gpt2"], (Own, TaskConfig())):
        task = build_engine(kind, section, layers=2).task
        assert type(task) is kind
        assert not [name for name in vars(task) if callable(getattr(kind, name, None))]


STRATEGY = """
from functools import partial

from drawbar import Strategy
from drawbar.engines.executors import TrainingForward, task_loss
from drawbar.engines.local_model import LocalModel, build_model
from drawbar.engines.torch_strategies import assemble


def build(task, config, world):
    model = MODEL
    training_forward = TrainingForward(model, partial(task_loss, task, None, model))
    return assemble(task, config, world, LocalModel(model, model, None), training_forward)


own = Strategy("own", build)
"""


def test_a_strategy_that_does_not_let_its_model_be_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, model in (("as_documented", "build_model(task)"), ("by_itself", "task.build_model()")):
        (tmp_path / f"{name}.py").write_text(STRATEGY.replace("MODEL", model))
    assert dropped(build(*SCRATCH["gpt2"], parallel=ParallelSection(strategy="as_documented:own"))) == []
    with pytest.raises(UserError, match=r"by task.build_model\(\)[\s\S]*local_model.build_model\(task\)"):
        build(*SCRATCH["gpt2"], parallel=ParallelSection(strategy="by_itself:own"))


def test_what_the_machine_cannot_compute_is_refused_before_the_data_are_read() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU computes it")
    kind, task = SCRATCH["llama"]
    config = tiny_config(device="auto", data=DataSection(train="no_such_file.txt"))
    config = config.model_copy(update={"task": task.model_copy(update={"cross_entropy": "liger"})})
    workload = Workload(config, kind, steps=1, tokenizer=TOKENIZER)
    with pytest.raises(UserError, match="liger-kernel only has kernels for CUDA devices"):
        train(workload, config, Distributed(RankInfo(), CPU, 60))


def test_every_engine_starts_from_the_same_weights() -> None:
    kind, task = SCRATCH["llama"]
    one = build(kind, task)
    torch.manual_seed(99)
    other = build(kind, task)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
