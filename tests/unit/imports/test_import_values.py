"""``drawbar import``: keys whose values mean something else than the same number here."""

from pathlib import Path
from typing import Any

import pytest

from drawbar.imports.conversion import Conversion, load_source
from drawbar.imports.reading import read_keys

HF = "model_name_or_path: m\n"
AXOLOTL = "base_model: m/llama\nlearning_rate: 1e-4\ndatasets: [{path: a/b, type: alpaca}]\n"
QLORA = "adapter: qlora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
DPO = AXOLOTL.replace("type: alpaca", "type: chat_template.default, field_messages: turns") + "rl: dpo\n"
ORPO = AXOLOTL.replace("type: alpaca", "type: chat_template.argilla") + "rl: orpo\norpo_alpha: 0.2\n"
SIMPO = DPO.replace("rl: dpo", "rl: simpo") + "simpo_gamma: 0.7\n"
LF = "model_name_or_path: m/llama3\ntemplate: llama3\nfinetuning_type: full\n"


def converted(source: str, text: str, folder: Path, suffix: str = ".yaml") -> Conversion:
    path = folder / f"file{suffix}"
    path.write_text(text, encoding="utf-8")
    return Conversion(read_keys(path), load_source(source)).convert()


@pytest.mark.parametrize(
    ("source", "text", "setting", "value"),
    [
        ("huggingface", HF + "warmup_steps: 0.1", "optim.warmup", 0.1),
        ("huggingface", HF + "neftune_noise_alpha: 5", "task.embedding_noise", 5),
        ("huggingface", HF + "adam_beta1: 0.0\nadam_epsilon: 0.5", "optim.betas", [0.0, 0.999]),
        ("huggingface", HF + "max_length: 9\npacking: false\ngroup_by_length: true", "data.batching", "grouped"),
        ("huggingface", HF + "warmup_steps: 1", "optim.warmup", 1),
        ("huggingface", HF + "warmup_ratio: 0.1", "optim.warmup", 0.1),
        ("huggingface", HF + "lr_scheduler_type: constant\nwarmup_steps: 9", "optim.warmup", 0),
        ("huggingface", HF + "lr_scheduler_type: constant_with_warmup\nwarmup_steps: 9", "optim.warmup", 9),
        ("huggingface", HF + "lr_scheduler_type: polynomial\nlearning_rate: 1e-3", "optim.min_lr_ratio", 1e-4),
        ("huggingface", HF + "max_steps: -1", "train.epochs", 3),
        ("huggingface", HF + "max_steps: 10\nnum_train_epochs: 2", "train.steps", 10),
        ("huggingface", HF + "weight_decay: 0.3", "optim.weight_decay", 0.3),
        ("huggingface", HF, "optim.weight_decay", 0.0),
        ("huggingface", HF, "optim.lr", 5e-5),
        ("huggingface", HF + "max_length: 9", "optim.lr", 2e-5),
        ("huggingface", HF + "max_length: 9", "precision", "bf16"),
        ("huggingface", HF, "precision", "fp32"),
        ("huggingface", HF, "run.seed", 42),
        ("huggingface", HF, "train.global_batch", 8),
        ("huggingface", HF + "max_grad_norm: 0", "train.gradient_clip", None),
        ("huggingface", HF + "optim: rmsprop", "optim.name", "torch.optim:RMSprop"),
        ("huggingface", HF + "max_length: 9\nfp16: true", "precision", "fp16"),
        ("huggingface", HF + "block_size: 9\ntrain_file: a.txt", "data.validation_share", 0.05),
        ("huggingface", HF + "max_length: 9", "task.text_column", "text"),
        (
            "huggingface",
            HF + "max_length: 9\ndataset_name: a/b\neval_strategy: epoch",
            "data.validation",
            {"dataset": "a/b", "split": "test"},
        ),
        ("huggingface", HF + "completion_only_loss: true", "task.completion_column", "completion"),
        ("huggingface", HF + "line_by_line: true\ntrain_file: a.txt", "task.type", "masked_lm"),
        ("huggingface", HF + "fsdp: shard_grad_op auto_wrap", "parallel.reshard", False),
        ("huggingface", HF + "fsdp: full_shard offload", "parallel.offload", True),
        ("axolotl", AXOLOTL + "fp16: true", "precision", "fp16"),
        ("axolotl", AXOLOTL + QLORA + "load_in_4bit: true", "lora.base", "nf4"),
        ("axolotl", AXOLOTL + QLORA + "load_in_8bit: true\nload_in_4bit: false", "lora.base", "int8"),
        ("axolotl", AXOLOTL + QLORA + "peft_use_dora: true", "lora.dora", True),
        ("huggingface", HF + "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: nf4", "lora.base", "nf4"),
        ("llama_factory", LF.replace("full", "lora") + "quantization_bit: 4", "lora.base", "nf4"),
        ("axolotl", AXOLOTL + "warmup_steps: 1", "optim.warmup", 2),
        ("axolotl", AXOLOTL, "optim.warmup", 0.03),
        ("axolotl", AXOLOTL + "warmup_steps: 0", "optim.warmup", 0),
        ("axolotl", AXOLOTL, "optim.schedule", "cosine"),
        ("axolotl", AXOLOTL, "task.prompt_column", "instruction"),
        ("axolotl", AXOLOTL + "micro_batch_size: 2\nbatch_size: 8", "train.global_batch", 8),
        (
            "axolotl",
            AXOLOTL + "micro_batch_size: 2\nbatch_size: 8\ngradient_accumulation_steps: 3",
            "train.global_batch",
            6,
        ),
        ("axolotl", AXOLOTL + "val_set_size: 0.2", "data.validation_share", 0.2),
        (
            "llama_factory",
            LF + "finetuning_type: lora\nlora_rank: 4".replace("finetuning_type: lora\n", ""),
            "optim.lr",
            5e-5,
        ),
        ("axolotl", DPO, "task.method", "dpo"),
        ("axolotl", DPO, "task.prompt_column", "turns"),
        ("axolotl", DPO + "rl_beta: 0.3\norpo_alpha: 0.4", "task.beta", 0.3),
        ("axolotl", DPO + "dpo_label_smoothing: 0.1", "task.label_smoothing", 0.1),
        ("axolotl", DPO + QLORA + "lora_dropout: 0.1", "lora.dropout", 0.0),
        ("axolotl", ORPO, "task.beta", 0.2),
        ("axolotl", ORPO, "task.prompt_column", None),
        ("axolotl", SIMPO + "cpo_alpha: 0", "task.gamma", 0.7),
        ("huggingface", HF + "loss_type: sigmoid\nbeta: 0.2", "task.beta", 0.2),
        ("huggingface", HF + "loss_type: [ipo]\nbeta: 0.2", "task.method", "ipo"),
        ("huggingface", HF + "beta: 0.2\nloss_type: sigmoid", "optim.lr", 1e-6),
        ("huggingface", HF + "desirable_weight: 1.5", "task.method", "kto"),
        ("huggingface", HF + "undesirable_weight: 1.5", "task.undesirable_weight", 1.5),
        ("huggingface", HF + "loss_type: simpo\nbeta: 2\ncpo_alpha: 0", "task.method", "simpo"),
        ("llama_factory", LF + "stage: dpo", "task.method", "dpo"),
        ("llama_factory", LF + "stage: dpo\npref_loss: orpo\npref_beta: 0.2", "task.beta", 0.2),
        ("llama_factory", LF + "stage: kto\nkto_chosen_weight: 2", "task.desirable_weight", 2),
        ("llama_factory", LF + "stage: rm", "task.type", "reward"),
        ("llama_factory", LF, "data.sequence_length", 2048),
        ("llama_factory", LF, "parallel.activation_checkpointing", "full"),
        ("llama_factory", LF + "stage: pt", "data.batching", "packed"),
        ("llama_factory", LF, "data.batching", "padded"),
    ],
)
def test_a_value_means_this(source: str, text: str, setting: str, value: Any, tmp_path: Path) -> None:
    found = converted(source, text, tmp_path).settings[setting]
    assert found == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("source", "text", "key"),
    [
        (
            "huggingface",
            HF + "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 2}",
            "lr_scheduler_kwargs.num_cycles",
        ),
        ("huggingface", HF + "lr_scheduler_type: warmup_stable_decay", "lr_scheduler_type"),
        ("huggingface", HF + "fsdp: hybrid_shard", "fsdp"),
        ("huggingface", HF + "train_file: a.txt", "train_file"),
        ("huggingface", HF + "deepspeed: absent.json", "deepspeed"),
        ("huggingface", HF + "beta: 0.1", "beta"),
        ("huggingface", HF + "loss_type: nll\nbeta: 0.1", "beta"),
        ("huggingface", HF + "loss_type: simpo\nbeta: 2", "loss_type"),
        ("huggingface", HF + "loss_type: simpo", "loss_type"),
        ("huggingface", HF + "max_length: 9\ndisable_dropout: true", "disable_dropout"),
        ("huggingface", HF + "loss_type: sigmoid\ndisable_dropout: false", "disable_dropout"),
        ("huggingface", HF + "loss_type: [sigmoid, sft]", "loss_type"),
        ("huggingface", HF + "loss_type: sigmoid\ncpo_alpha: 1.0", "cpo_alpha"),
        ("huggingface", HF + "desirable_weight: 1.0\nloss_type: apo_zero_unpaired", "loss_type"),
        ("axolotl", AXOLOTL + "rl: dpo", "datasets[0].type"),
        ("axolotl", AXOLOTL + "rl: grpo", "rl"),
        ("axolotl", DPO + "dpo_loss_type: [hinge]", "dpo_loss_type"),
        ("axolotl", SIMPO, "rl"),
        ("axolotl", AXOLOTL + "reward_model: true", "reward_model"),
        ("llama_factory", LF + "stage: ppo", "stage"),
        ("llama_factory", LF + "stage: dpo\npref_loss: hinge", "pref_loss"),
        ("axolotl", AXOLOTL + "train_on_inputs: true", "train_on_inputs"),
        ("axolotl", AXOLOTL + "val_set_size: 100", "val_set_size"),
        ("axolotl", AXOLOTL + "optimizer: lion_8bit", "optimizer"),
        (
            "axolotl",
            AXOLOTL + "adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_modules: 'a.*b'",
            "lora_target_modules",
        ),
        ("axolotl", AXOLOTL + "special_tokens: {eos_token: <|end|>}", "special_tokens.eos_token"),
        ("axolotl", AXOLOTL + "datasets: []\nplugins: [a.b.Odd]".replace("datasets: []\n", ""), "plugins"),
        ("llama_factory", LF + "train_on_prompt: true", "train_on_prompt"),
        ("llama_factory", LF.replace("m/llama3", "m/odd"), "template"),
        ("llama_factory", LF + "dataset: a,b\nmax_samples: 5", "max_samples"),
    ],
)
def test_what_would_change_the_run_is_refused(source: str, text: str, key: str, tmp_path: Path) -> None:
    assert key in [entry.key for entry in converted(source, text, tmp_path).refusals]


@pytest.mark.parametrize("text", ["neftune_noise_alpha: 0", "deepspeed:", "optim_args: ''", "load_in_4bit: false"])
def test_a_value_that_says_that_it_is_off_is_not_refused(text: str, tmp_path: Path) -> None:
    assert converted("huggingface", HF + text, tmp_path).refusals == []


def test_optimizers_that_round_their_state_are_named(tmp_path: Path) -> None:
    notes = converted("huggingface", HF + "optim: adamw_bnb_8bit", tmp_path).notes
    assert any("optim (line 2)" in note and "few bits" in note for note in notes)


def test_other_quantization_is_refused(tmp_path: Path) -> None:
    text = HF + "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: fp4"
    assert [entry.key for entry in converted("huggingface", text, tmp_path).refusals] == ["bnb_4bit_quant_type"]


def test_what_is_refused_says_its_key(tmp_path: Path) -> None:
    schedule = "[lr_scheduler]\nwarmup_steps = 5\ndecay_ratio = 0.2\ndecay_type = 'cosine'\nmin_lr_factor = 0.1\n"
    found = converted("torchtitan", f"[training]\nsteps = 50\n{schedule}", tmp_path, ".toml").refusals
    assert "lr_scheduler.min_lr_factor" in [entry.key for entry in found]
    found = converted("axolotl", AXOLOTL + "adapter: lora\nlora_r: 8\n", tmp_path).refusals
    assert [entry.text for entry in found if entry.key == "adapter"] == [
        "an adapter needs lora_r and lora_alpha: axolotl has no defaults for them"
    ]


def test_lists_with_tags(tmp_path: Path) -> None:
    text = AXOLOTL + "adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_modules: !!python/tuple [q_proj, v_proj]\n"
    assert converted("axolotl", text, tmp_path).settings["lora.modules"] == ["q_proj", "v_proj"]


def test_toml_lines(tmp_path: Path) -> None:
    found = converted("torchtitan", '[job]\ndescription = """\n[x]\n"""\n[training]\n\nsteps = 5\n', tmp_path, ".toml")
    assert found.line("training.steps") == 7
    assert found.settings["train.steps"] == 5


@pytest.mark.parametrize(
    ("stage", "dataset", "refused"),
    [
        ("sft", "chats", False),
        ("sft", "openai", False),
        ("sft", "odd", True),
        ("sft", "facts", True),
        ("sft", "absent", True),
        ("sft", "moved", True),
        ("sft", "part", True),
        ("dpo", "pairs", False),
        ("rm", "pairs", False),
        ("sft", "pairs", True),
        ("dpo", "chats", True),
        ("kto", "judged", False),
        ("sft", "judged", True),
    ],
)
def test_datasets_of_llama_factory(stage: str, dataset: str, refused: bool, tmp_path: Path) -> None:
    """Chats of the usual roles are read; instructions, other roles and unknown names are refused."""
    folder = Path(__file__).parent / "files" / "datasets"
    found = converted("llama_factory", f"{LF}stage: {stage}\ndataset: {dataset}\ndataset_dir: {folder}", tmp_path)
    assert ("dataset" in [entry.key for entry in found.refusals]) == refused


@pytest.mark.parametrize(
    ("stage", "dataset", "columns"),
    [
        ("dpo", "pairs", {"prompt_column": "asked", "chosen_column": "chosen", "rejected_column": "worse"}),
        ("rm", "pairs", {"prompt_column": "asked", "chosen_column": "chosen", "rejected_column": "worse"}),
        ("kto", "judged", {"prompt_column": None, "completion_column": "messages", "label_column": "good"}),
    ],
)
def test_columns_of_preferences(stage: str, dataset: str, columns: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(__file__).parent / "files" / "datasets"
    text = f"{LF}stage: {stage}\ndataset: {dataset}\ndataset_dir: {folder}"
    found = converted("llama_factory", text, tmp_path).settings
    assert {name: found[f"task.{name}"] for name in columns} == columns
