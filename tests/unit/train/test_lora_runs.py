"""Runs that train low-rank adapters: what is saved, resumed, evaluated and refused."""

import contextlib
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import drawbar
from drawbar.commands.export_run import ExportFormat, export_run
from drawbar.commands.score_run import evaluate_run
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.errors import UserError
from runs import fit_in, largest_difference, losses, scores, weights

SIZES = {
    "vocab_size": 280,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CONFIG = """\
run: {name: tiny}
data: {train: records.jsonl, validation: records.jsonl, sequence_length: 32}
train: {global_batch: 8, micro_batch: 4, steps: 12}
optim: {lr: 2.0e-2, warmup: 2}
lora: {rank: 2, dropout: 0.1}
eval: {every: 6}
checkpoint: {every: 6, keep: 5}
precision: fp32
device: cpu
tracking: {tensorboard: false, log_every: 1}
"""
TASKS = {
    "llama": "task: {type: causal_lm, model: llama}\n",
    "mixture": "task: {type: causal_lm, model: mixture}\n",
    "bert": "task: {type: sequence_classification, model: bert}\n",
}
LORA = "lora: {rank: 2, dropout: 0.1}"
OTHER_LORA = {"mixture": "lora: {rank: 2, modules: [linear, experts]}"}
HEADS = {"llama": set(), "mixture": set(), "bert": {"bert.pooler.dense", "classifier"}}
"""What the pretrained models do not have."""
ADAPTED = {"llama": 2, "mixture": 6, "bert": 2}
"""Weights with adapters in a layer: query and value, or all linear layers and the fused experts."""
FAMILIES = pytest.mark.parametrize("family", ["llama", "mixture", "bert"])


def config_of(family: str) -> str:
    return TASKS[family] + CONFIG.replace(LORA, OTHER_LORA.get(family, LORA))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pretrained models, and a run of adapters on each, of 12 steps without interruption."""
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)).save_pretrained(
        folder / "llama"
    )
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **mixture, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(folder / "mixture")
    # as a masked language model is exported: classifiers need a pooler, too
    BertModel(BertConfig(**SIZES), add_pooling_layer=False).save_pretrained(folder / "bert")
    tokenizer = train_byte_bpe(["a good road and a bad road"] * 9, 280)
    words = ("good", "bad")
    records = [{"text": f"a {words[number % 2]} road {number}", "label": number % 2} for number in range(20)]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for family in TASKS:
        tokenizer.save_pretrained(str(folder / family))
        (folder / "config.yaml").write_text(config_of(family))
        fit_in(folder, f"run.name={family}")
    return folder


def use(project: Path, family: str) -> Path:
    (project / "config.yaml").write_text(config_of(family))
    return project / "runs" / family


@FAMILIES
def test_a_checkpoint_holds_adapters_and_what_is_new_alone(family: str, project: Path) -> None:
    saved = weights(use(project, family), 12)
    heads = {name for name in saved if "lora_" not in name}
    assert heads == {f"{module}.{leaf}" for module in HEADS[family] for leaf in ("weight", "bias")}
    adapters = [name for name in saved if "lora_" in name]
    assert len(adapters) == 2 * ADAPTED[family] * 2  # A and B, in two layers
    ranks = {2, 2 * 4} if family == "mixture" else {2}  # of fused parameters, those of all experts
    assert all(ranks & set(saved[name].shape) for name in adapters)
    before = weights(project / "runs" / family, 6)
    assert all(not torch.equal(before[name], saved[name]) for name in saved)


def test_it_learns(project: Path) -> None:
    trace = losses(use(project, "llama"))
    assert sum(list(trace.values())[-3:]) < sum(list(trace.values())[:3])


@FAMILIES
def test_resumed_it_is_as_if_nothing_had_happened(family: str, project: Path) -> None:
    whole = use(project, family)
    other = project / "runs" / f"{family}-resumed"
    fit_in(project, f"run.name={other.name}", resume=str(whole / "checkpoints" / "step-00000006"))
    assert losses(other) == {step: loss for step, loss in losses(whole).items() if step > 6}
    assert scores(other)[12] == scores(whole)[12]
    for name, tensor in weights(whole, 12).items():
        assert torch.equal(tensor, weights(other, 12)[name]), name


@FAMILIES
def test_evaluation_from_a_checkpoint(family: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = use(project, family)
    monkeypatch.chdir(project)
    config = drawbar.load_config("config.yaml", [f"run.name={family}"]).config
    found = {step: evaluate_run(config, None, "validation", str(step)) for step in (6, 12)}
    for step, of_step in found.items():
        assert {f"eval/validation/{name}": value for name, value in of_step.items()} == pytest.approx(
            scores(run)[step], rel=1e-6
        )
    assert found[6]["loss"] != found[12]["loss"]


def test_the_pretrained_weights_stay_as_they_are(project: Path, tmp_path: Path) -> None:
    use(project, "llama")
    before = load_file(project / "llama" / "model.safetensors")
    fit_in(project, "run.name=again", "train.steps=2", "optim.warmup=0")
    after = load_file(project / "llama" / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_loaded_run_has_its_weights_in_fp32(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes the model in hand calls it without autocast; only training stores frozen weights low."""
    use(project, "llama")
    monkeypatch.chdir(project)
    fit_in(project, "run.name=low", "train.steps=1", "optim.warmup=0", "precision=bf16")
    model = drawbar.load_run(project / "runs" / "low").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model(input_ids=torch.arange(4)[None]).logits.dtype == torch.float32


@pytest.mark.parametrize("merge", [False, True])
def test_an_export_gives_the_scores_of_the_run(
    merge: bool, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = use(project, "bert")
    monkeypatch.chdir(project)
    export_run(
        drawbar.load_config("config.yaml", ["run.name=bert"]).config, None, tmp_path / "it", "12", ExportFormat(merge)
    )
    folder = project / "bert" if not merge else tmp_path / "it"
    model = BertForSequenceClassification.from_pretrained(folder)  # what it lacks is drawn anew
    model = model if merge else peft.PeftModel.from_pretrained(model, tmp_path / "it")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "it")
    records = [json.loads(line) for line in (project / "records.jsonl").read_text().splitlines()]
    with torch.no_grad():
        logits = [model.eval()(**tokenizer(record["text"], return_tensors="pt")).logits for record in records]
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.tensor([record["label"] for record in records]))
    assert float(loss) == pytest.approx(scores(run)[12]["eval/validation/loss"], rel=1e-5)


@pytest.mark.parametrize("merge", [False, True])
def test_an_export_of_experts_is_the_trained_model(merge: bool, project: Path, tmp_path: Path) -> None:
    use(project, "mixture")
    with contextlib.chdir(project):
        loaded = drawbar.load_run("runs/mixture")
        config = drawbar.load_config("config.yaml", ["run.name=mixture"]).config
        export_run(config, None, tmp_path / "it", None, ExportFormat(merge))
    folder = tmp_path / "it" if merge else project / "mixture"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = model if merge else peft.PeftModel.from_pretrained(model, tmp_path / "it")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens).logits, loaded.model.eval()(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "mixture"])
def test_fsdp_trains_what_the_pretrained_model_lacks_and_experts(family: str, project: Path) -> None:
    whole = use(project, family)
    fit_in(project, f"run.name={family}-fsdp", "parallel.strategy=fsdp")
    assert largest_difference(losses(project / "runs" / f"{family}-fsdp"), losses(whole)) < 1e-6
    assert weights(project / "runs" / f"{family}-fsdp", 12).keys() == weights(whole, 12).keys()


@pytest.fixture(scope="module")
def in_4_bits(project: Path) -> Path:
    """A run on a base in nf4, without interruption."""
    use(project, "llama")
    fit_in(project, "run.name=nf4", "lora.base=nf4", "lora.modules=linear")
    return project / "runs" / "nf4"


def test_a_packed_base_trains_otherwise_and_resumes_bit_by_bit(in_4_bits: Path, project: Path) -> None:
    use(project, "llama")
    packed = ("lora.base=nf4", "lora.modules=linear")
    fit_in(project, "run.name=nf4-resumed", *packed, resume=str(in_4_bits / "checkpoints" / "step-00000006"))
    other = project / "runs" / "nf4-resumed"
    assert losses(other) == {step: loss for step, loss in losses(in_4_bits).items() if step > 6}
    assert scores(other)[12] == scores(in_4_bits)[12]
    saved = weights(in_4_bits, 12)
    assert all(torch.equal(tensor, weights(other, 12)[name]) for name, tensor in saved.items())
    assert all("lora_" in name for name in saved)
    fit_in(project, "run.name=whole-base", "lora.modules=linear")
    assert 1e-6 < largest_difference(losses(project / "runs" / "whole-base"), losses(in_4_bits)) < 0.1


def test_a_run_goes_on_only_upon_the_base_that_it_had(in_4_bits: Path, project: Path) -> None:
    use(project, "llama")
    with pytest.raises(UserError, match=r"lora\.base +nf4 +int8"):
        fit_in(project, "run.name=nf4", "lora.base=int8", "lora.modules=linear", "train.steps=13")


def test_a_packed_base_is_the_same_after_training(in_4_bits: Path, project: Path, tmp_path: Path) -> None:
    use(project, "llama")
    settings = ["run.name=nf4", "lora.base=nf4", "lora.modules=linear"]
    with contextlib.chdir(project):
        config = drawbar.load_config("config.yaml", settings).config
        found = evaluate_run(config, None, "validation", "12")
        run = drawbar.load_run("runs/nf4")
        for merge in (False, True):
            export_run(config, None, tmp_path / str(merge), "12", ExportFormat(merge))
    assert found["loss"] == pytest.approx(scores(in_4_bits)[12]["eval/validation/loss"], rel=1e-6)
    tokens = torch.arange(40)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "True").eval()
    # of the adapters alone, the unpacked base is another model
    unpacked = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(project / "llama"), tmp_path / "False"
    )
    with torch.no_grad():
        expected = run.model.eval()(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=0, atol=1e-5)
        assert (unpacked.eval()(tokens).logits - expected).abs().max() > 1e-4


def test_lengths_of_dora_are_resumed_and_exported(project: Path, tmp_path: Path) -> None:
    whole = use(project, "llama").parent / "dora"
    settings = ["run.name=dora", "lora.dora=true", "lora.modules=linear", "lora.dropout=0"]
    fit_in(project, *settings)
    fit_in(project, *settings, "run.name=dora-resumed", resume=str(whole / "checkpoints" / "step-00000006"))
    saved, again = weights(whole, 12), weights(project / "runs" / "dora-resumed", 12)
    assert all(torch.equal(tensor, again[name]) for name, tensor in saved.items())
    lengths = {name for name in saved if "magnitude" in name}
    assert len(lengths) == 14
    assert not any(torch.equal(saved[name], weights(whole, 6)[name]) for name in lengths)
    with contextlib.chdir(project):
        config = drawbar.load_config("config.yaml", settings).config
        run = drawbar.load_run("runs/dora")
        for merge in (False, True):
            export_run(config, None, tmp_path / str(merge), "12", ExportFormat(merge))
    tokens = torch.arange(40)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "True")
    alone = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(project / "llama"), tmp_path / "False")
    with torch.no_grad():
        expected = run.model.eval()(tokens).logits
        for model in (merged, alone):
            torch.testing.assert_close(model.eval()(tokens).logits, expected, rtol=0, atol=1e-5)


@pytest.fixture
def other_base(project: Path, tmp_path: Path) -> str:
    """The setting of a pretrained model like the first, with one other weight, as after a new revision."""
    shutil.copytree(project / "llama", tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    return f"task.model={tmp_path / 'base'}"


def test_adapters_go_on_upon_their_own_pretrained_model_alone(project: Path, other_base: str) -> None:
    run = use(project, "llama")
    checkpoint = str(run / "checkpoints" / "step-00000006")
    with pytest.raises(UserError, match=r"are not those that the adapters [\s\S]*--fork NEWNAME"):
        fit_in(project, "run.name=other", other_base, resume=checkpoint)
    assert not (project / "runs" / "other").exists()
    fit_in(project, "run.name=llama", other_base, resume=checkpoint, fork="forked")
    assert "are not those that the adapters" in (project / "runs" / "forked" / "logs" / "rank-0000.log").read_text()


def test_an_evaluation_on_another_pretrained_model_says_so(
    project: Path, other_base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = use(project, "llama")
    log = run / "logs" / "rank-0000.log"
    monkeypatch.chdir(project)
    for setting in ("task.model=llama", other_base):
        assert "are not those that the adapters" not in log.read_text()
        config = drawbar.load_config("config.yaml", ["run.name=llama", setting]).config
        evaluate_run(config, None, "validation", "12")
    assert "are not those that the adapters" in log.read_text()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("task.from_scratch={}", "task.tokenizer={train: byte_bpe}"), "name a pretrained model"),
        (("task.resize_embeddings=true",), "remove lora"),
        (("lora.modules=[nowhere]",), "'nowhere'"),
        (("lora.train=[nowhere]",), "'nowhere'"),
        (("lora.rank=0",), "lora.rank"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: tuple[str, ...], says: str, project: Path) -> None:
    use(project, "llama")
    with pytest.raises(UserError) as refused:
        fit_in(project, "run.name=refused", *settings)
    assert says in str(refused.value)
    assert "lora" in str(refused.value)
    assert not (project / "runs" / "refused").exists()
