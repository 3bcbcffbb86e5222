import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
    RobertaConfig,
    T5Config,
)

from drawbar.config.schema.run_config import LoraSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.models.huggingface import load_pretrained, weights_without_file
from drawbar.models.lora import (
    adapted_parameters,
    add_adapters,
    add_adapters_to_base,
    describe_adapters,
    merged,
    merged_weight,
    save_adapter,
    trained_state,
)

torch.set_num_threads(1)  # tiny tensors: threads would only wait for one another
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 1], [9, 3, 7, 4, 2, 1]])
ENCODER = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
Build = Callable[[], nn.Module]


class Plain(nn.Module):
    """No transformers, with batch norm, whose statistics move although its weights are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.norm(self.first(pixels)).relu()).relu())


def llama(tied: bool = False) -> nn.Module:
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": 0, "eos_token_id": 1}
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, **dropout, **special)
    return AutoModelForCausalLM.from_config(config)


def bert() -> nn.Module:
    return AutoModelForSequenceClassification.from_config(BertConfig(**ENCODER))


def roberta() -> nn.Module:
    return AutoModelForSequenceClassification.from_config(RobertaConfig(**ENCODER, pad_token_id=0))


def experts(kind: str, **fields: Any) -> Build:
    def build_mixture() -> nn.Module:
        sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
        config = AutoConfig.for_model(kind, **{**sizes, **heads, "pad_token_id": None, "eos_token_id": 1, **fields})
        return AutoModelForCausalLM.from_config(config)

    return build_mixture


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return AutoModelForSeq2SeqLM.from_config(config)


MODELS: dict[str, tuple[Build, LoraSection, set[str]]] = {
    "llama": (llama, LoraSection(), {"q_proj", "v_proj"}),
    "llama, tied": (
        lambda: llama(tied=True),
        LoraSection(modules="linear"),
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
    "llama, tied embeddings trained": (
        lambda: llama(tied=True),
        LoraSection(train=["embed_tokens"]),
        {"q_proj", "v_proj"},
    ),
    "gpt2": (gpt2, LoraSection(), {"c_attn"}),
    "gpt2, linear": (gpt2, LoraSection(modules="linear", rank=2, alpha=3.0), {"c_attn", "c_proj", "c_fc"}),
    "gpt2, by name": (gpt2, LoraSection(modules=["mlp.c_proj"]), {"c_proj"}),
    "llama, of several ranks": (
        llama,
        LoraSection(modules="linear", ranks={"down_proj": 3, r"layers\.1\..*proj": 2}, rslora=True),
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
    "bert": (bert, LoraSection(), {"query", "value"}),
    "roberta, linear": (roberta, LoraSection(modules="linear"), {"query", "key", "value", "dense"}),
    "t5": (t5, LoraSection(dropout=0.1), {"q", "v"}),
    "plain": (Plain, LoraSection(modules=["first", "second"], train=["last"]), {"first", "second"}),
    "qwen3_moe": (
        experts("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8),
        LoraSection(modules=["linear", "experts"]),
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"},
    ),
    "mixtral": (
        experts("mixtral", num_local_experts=4),
        LoraSection(modules=["gate_up_proj", "q_proj"]),
        {"q_proj", "gate_up_proj"},
    ),
    "gpt_oss": (  # its matrices are transposed
        experts("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8),
        LoraSection(modules=["attention", "experts.down_proj"]),
        {"q_proj", "v_proj", "down_proj"},
    ),
    "granitemoe": (
        experts("granitemoe", num_local_experts=4, num_experts_per_tok=2),
        LoraSection(modules=["experts"]),
        {"gate_up_proj", "down_proj"},
    ),
}
TRAINED_WHOLE = {
    "llama, tied embeddings trained": {"model.embed_tokens.weight"},
    "bert": {"classifier.weight", "classifier.bias"},
    "roberta, linear": {f"classifier.{layer}.{part}" for layer in ("dense", "out_proj") for part in ("weight", "bias")},
    "plain": {"last.weight", "last.bias"},
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name][0]()


def adapted(name: str) -> nn.Module:
    """The weights and adapters depend on the seed alone, as after a restart."""
    return add_adapters(build(name), MODELS[name][1])


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return scores(model.eval())


def scores(model: nn.Module) -> torch.Tensor:
    if isinstance(model, Plain):
        return model(torch.arange(24.0).reshape(4, 6).sin())
    more = {"decoder_input_ids": TOKENS.flip(0)} if model.config.is_encoder_decoder else {}
    return model(input_ids=TOKENS, **more).logits


def train(model: nn.Module, steps: int = 4) -> nn.Module:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    model.train()
    for _ in range(steps):
        scores(model).log_softmax(-1)[..., 0].mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def frozen(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def assert_close(one: torch.Tensor, other: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


@every_model
def test_adapters_and_what_is_trained_whole_are_all_that_is_trained(name: str) -> None:
    model = adapted(name)

    trained = {n for n, p in model.named_parameters() if p.requires_grad}

    adapters = {n for n in trained if ".lora_" in n}
    of_weights = {n.removesuffix(".weight").rpartition(".")[2] for n in adapted_parameters(model)}
    assert of_weights == MODELS[name][2]
    assert {n.split(".lora_")[0] for n in adapters} == {one.name for one in adapted_parameters(model).values()}
    assert trained - adapters == TRAINED_WHOLE.get(name, set())


@every_model
def test_adapters_change_nothing_before_they_are_trained(name: str) -> None:
    before, model = build(name), adapted(name)

    assert type(model) is type(before)
    torch.testing.assert_close(logits(model), logits(before), rtol=0, atol=0)


@every_model
def test_training_leaves_the_frozen_weights_bitwise_as_they_were(name: str) -> None:
    model = adapted(name)
    before, first = frozen(model), logits(model)

    train(model)

    after = frozen(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not torch.allclose(first, logits(model), atol=1e-3)


@every_model
def test_every_trained_parameter_gets_a_gradient_so_that_ddp_waits_for_none(name: str) -> None:
    model = train(adapted(name), steps=1)

    scores(model).square().mean().backward()

    assert [n for n, p in model.named_parameters() if (p.grad is not None) != p.requires_grad] == []


@every_model
def test_the_trained_state_makes_a_new_model_the_same(name: str) -> None:
    model = train(adapted(name))
    state = {key: tensor.clone() for key, tensor in trained_state(model).items()}

    fresh = adapted(name)
    fresh.load_state_dict(state, strict=False)

    torch.testing.assert_close(logits(fresh), logits(model), rtol=0, atol=0)
    assert not any(".base_layer." in key.partition(".lora_")[0] for key in state if ".lora_" not in key)


@every_model
def test_a_merged_model_is_an_ordinary_one_with_the_same_outputs(name: str, tmp_path: Path) -> None:
    model, original = train(adapted(name)), build(name)
    wanted = logits(model)

    result = merged(model)

    assert_close(logits(result), wanted)
    # a forward pass of fused parameters with adapters changes the order of their names
    assert sorted(result.state_dict()) == sorted(original.state_dict())
    assert len(list(result.parameters())) == len(list(original.parameters()))  # what was tied is tied
    assert {type(m) for m in result.modules()} == {type(m) for m in original.modules()}
    if isinstance(result, PreTrainedModel):
        result.save_pretrained(tmp_path)
        loaded, info = type(result).from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert_close(logits(loaded), wanted)


@every_model
def test_a_merged_weight_is_that_of_the_merged_model(name: str) -> None:
    model, weights = train(adapted(name)), build(name).state_dict()
    state = {key: tensor.clone() for key, tensor in trained_state(model).items()}
    with torch.device("meta"):
        without_values = adapted(name)

    copies = {key: weight.clone() for key, weight in weights.items()}
    found = {key: merged_weight(one, state, copies) for key, one in adapted_parameters(without_values).items()}

    whole = merged(model).state_dict()
    assert found
    for key, weight in found.items():
        torch.testing.assert_close(weight, whole[key], rtol=0, atol=1e-6)
        assert not torch.equal(weight, weights[key])


def test_what_has_no_adapters_is_described() -> None:
    mixture = MODELS["qwen3_moe"][0]
    said = describe_adapters(add_adapters(mixture(), LoraSection(modules="linear", rank=2)))
    assert re.fullmatch(
        r"lora: 512 of [\d,]+ parameters are trained; without adapters: gate_up_proj \(3,072\), down_proj \(1,536\), "
        r"embed_tokens \(640\), lm_head \(640\), gate \(128\)",
        said,
    )
    said = describe_adapters(add_adapters(mixture(), LoraSection(modules=["linear", "experts"], rank=2)))
    assert said.endswith("without adapters: embed_tokens (640), lm_head (640), gate (128)")


def test_fused_parameters_take_no_dropout() -> None:
    with pytest.raises(UserError, match=r"experts.gate_up_proj, take no dropout\n  where: lora.dropout"):
        add_adapters(MODELS["qwen3_moe"][0](), LoraSection(modules=["experts"], dropout=0.1))


def test_a_word_that_fits_neither_modules_nor_fused_parameters_is_answered_with_both() -> None:
    with pytest.raises(UserError, match=r"ends in 'expert'[\s\S]*q_proj[\s\S]*experts.gate_up_proj, experts.down_proj"):
        add_adapters(MODELS["qwen3_moe"][0](), LoraSection(modules=["linear", "expert"]))


@every_model
@pytest.mark.filterwarnings("error:.*[Mm]issing")
def test_peft_loads_a_saved_adapter(name: str, tmp_path: Path) -> None:
    model = train(adapted(name))

    save_adapter(model, tmp_path / "adapter", "some/base", model.state_dict().__getitem__)
    if name in ("qwen3_moe", "mixtral") and Version(peft.__version__) < Version("0.20"):
        pytest.skip("this peft cannot read adapters of experts with any transformers that drawbar takes")
    loaded = peft.PeftModel.from_pretrained(build(name), tmp_path / "adapter")

    assert_close(logits(loaded.get_base_model()), logits(model), atol=1e-6)
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_peft_loads_base_and_adapter_in_one(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    model = train(add_adapters(base, LoraSection()))

    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"), model.state_dict().__getitem__)
    loaded = peft.AutoPeftModel.from_pretrained(tmp_path / "adapter")

    assert_close(logits(loaded.get_base_model()), logits(model), atol=1e-6)


def test_what_no_file_has_is_trained_and_goes_with_the_adapters(tmp_path: Path) -> None:
    """A masked language model has no pooler, which a classifier needs: here it is random, and an adapter keeps it."""
    AutoModelForMaskedLM.from_config(BertConfig(**ENCODER)).save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    model = load_pretrained(str(tmp_path / "base"), "sequence_classification", num_labels=3)
    add_adapters(model, LoraSection(modules="linear"), weights_without_file(model))

    trained = {n for n, p in train(model).named_parameters() if p.requires_grad and ".lora_" not in n}
    save_adapter(model, tmp_path / "adapter", "some/base", model.state_dict().__getitem__)
    torch.manual_seed(2)
    drawn_anew = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    loaded = peft.PeftModel.from_pretrained(drawn_anew, tmp_path / "adapter")

    assert {n.rpartition(".")[0] for n in trained} == {"bert.pooler.dense", "classifier"}
    assert loaded.peft_config["default"].modules_to_save == ["bert.pooler.dense", "classifier"]
    assert trained <= trained_state(model).keys()
    assert_close(logits(loaded.get_base_model()), logits(model), atol=1e-6)


def test_the_digest_is_that_of_the_frozen_values_alone() -> None:
    def digest(change: str | None) -> str:
        model = build("bert")
        if change is not None:
            with torch.no_grad():
                model.get_parameter(change).view(-1)[-1].nextafter_(torch.tensor(9.0))
        return add_adapters_to_base(model, LoraSection(train=["pooler.dense"]), without_file=[]).digest

    whole = digest(None)
    assert digest("bert.embeddings.word_embeddings.weight") != whole
    assert digest("bert.encoder.layer.1.attention.self.query.bias") != whole  # inside an adapted layer
    assert digest("classifier.weight") == digest("bert.pooler.dense.bias") == whole


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_model_with_adapters_generates_as_the_merged_one(name: str) -> None:
    model = train(adapted(name), steps=2).eval()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}

    with_adapters = model.generate(TOKENS, **options)

    assert torch.equal(with_adapters, merged(model).generate(TOKENS, **options))


def test_adapters_follow_the_random_state() -> None:
    states = []
    for seed in (1, 1, 2):
        model = build("llama")
        torch.manual_seed(seed)
        states.append(trained_state(add_adapters(model, LoraSection())))

    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])
    assert states[0][name].dtype == torch.float32


def test_adapters_have_the_rank_and_scale_of_the_settings() -> None:
    layer = add_adapters(build("llama"), LoraSection(rank=4, alpha=6.0)).get_submodule(
        "model.layers.1.self_attn.q_proj"
    )

    assert layer.lora_A["default"].weight.shape == (4, 16)
    assert layer.scaling == {"default": 1.5}


def test_some_adapters_have_a_rank_of_their_own() -> None:
    model = adapted("llama, of several ranks")
    layers = {name: model.get_submodule(f"model.layers.{name}") for name in ("0.mlp.down_proj", "1.self_attn.q_proj")}
    assert {name: len(layer.lora_A["default"].weight) for name, layer in layers.items()} == {
        "0.mlp.down_proj": 3,
        "1.self_attn.q_proj": 2,
    }
    assert layers["0.mlp.down_proj"].scaling["default"] == pytest.approx(16 / 3**0.5)
    with pytest.raises(UserError, match="ends in 'gate'") as caught:
        add_adapters(build("llama"), LoraSection(modules="linear", ranks={"gate": 3}))
    assert caught.value.where == "lora.ranks"


def test_a_tied_embedding_stays_tied() -> None:
    model = adapted("llama, tied")

    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_whole_head_is_trained_where_peft_has_no_name_for_it() -> None:
    config = DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24)

    model = add_adapters(AutoModelForSequenceClassification.from_config(config), LoraSection())

    trained = {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n}
    assert trained == {"pre_classifier", "classifier"}


def test_a_head_of_ones_own_on_an_encoder_is_trained() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = build("bert").base_model
            self.classifier = nn.Linear(16, 2)

    model = add_adapters(Own(), LoraSection())

    trained = {n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n}
    assert trained == {"classifier.weight", "classifier.bias"}


@pytest.fixture
def fast_path() -> Iterator[None]:
    """torch's fast path for encoder layers, a setting of the whole process, as it was."""
    before = torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.usefixtures("fast_path")
def test_linear_leaves_out_what_a_multihead_attention_never_calls() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = add_adapters(Encoder(), LoraSection(modules="linear"))
    x = torch.randn(2, 3, 8)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        model(x)[..., 0].sum().backward()
        optimizer.step()

    assert {n.split(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad} == {
        "layer.linear1",
        "layer.linear2",
    }
    trained = model(x).detach()
    with torch.no_grad():
        assert_close(model.eval()(x), trained)  # torch's fast path would use the frozen weights alone
    assert_close(merged(model)(x).detach(), trained)


def test_an_adapter_on_an_embedding_and_on_a_convolution() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 6)
            self.convolution = nn.Conv1d(6, 4, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.convolution(self.embed(tokens).mT)

    model = add_adapters(Mixed(), LoraSection(modules=["embed", "convolution"], rank=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    wanted = model(TOKENS).detach()

    assert_close(merged(model)(TOKENS).detach(), wanted)


def test_ddp_accepts_the_model() -> None:
    with Distributed(RankInfo(), torch.device("cpu"), timeout=60) as world:
        world.ensure_process_group()
        alone, replicated = adapted("bert"), DistributedDataParallel(adapted("bert"))
        optimizer = torch.optim.AdamW([p for p in replicated.parameters() if p.requires_grad], lr=0.02)
        replicated.train()
        for _ in range(4):
            replicated(input_ids=TOKENS).logits.log_softmax(-1)[..., 0].mean().neg().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(logits(replicated.module), logits(train(alone)))


def test_an_unknown_module_name_is_answered_with_the_linear_ones() -> None:
    with pytest.raises(UserError, match="ends in 'q_prj'") as caught:
        add_adapters(build("llama"), LoraSection(modules=["v_proj", "q_prj"]))

    assert caught.value.where == "lora.modules"
    assert caught.value.remedy == (
        "name modules in lora.modules; the linear ones are: "
        "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )


def test_a_part_of_a_name_is_no_name() -> None:
    with pytest.raises(UserError, match="ends in 'proj'"):
        add_adapters(build("llama"), LoraSection(modules=["proj"]))


def test_a_model_without_known_attention_asks_for_names() -> None:
    with pytest.raises(UserError, match="attention") as caught:
        add_adapters(Plain(), LoraSection())

    assert "first, second, last" in str(caught.value.remedy)


def test_an_unknown_module_to_train_is_refused() -> None:
    with pytest.raises(UserError, match="ends in 'head'") as caught:
        add_adapters(build("bert"), LoraSection(train=["head"]))

    assert caught.value.where == "lora.train"
    assert "classifier" in str(caught.value.remedy)


def test_a_shared_weight_gets_no_adapter() -> None:
    with pytest.raises(UserError, match="lm_head shares its weight") as caught:
        add_adapters(build("llama, tied"), LoraSection(modules=["lm_head"]))

    assert "lora.train" in str(caught.value.remedy)


def test_what_peft_refuses_is_a_users_error() -> None:
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2))

    with pytest.raises(UserError, match="out_proj") as caught:
        add_adapters(mamba, LoraSection(modules="linear"))

    assert caught.value.where == "lora.modules"


def test_without_peft_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(UserError) as caught:
        add_adapters(build("llama"), LoraSection())

    assert 'pip install "drawbar[lora]"' in str(caught.value.remedy)
