"""An imported configuration trains as in LLaMA-Factory and axolotl, whose losses stand here: they need other versions
than drawbar.

LLaMA-Factory was 0.9.5 with transformers 5.6 and TRL 0.24, axolotl 0.19.0 with transformers 5.16 and TRL 1.9, both with
torch 2.13 on a CPU. To train there anew: ``PYTHONPATH=tests python tests/unit/imports/test_import_equals_others.py
FOLDER``, then in this folder ``llamafactory-cli train sft.yaml`` (its losses are in ``out/sft/trainer_log.jsonl``) and
``axolotl train axolotl_sft.yaml --launcher python`` (in ``out/axolotl_sft/checkpoint-5/trainer_state.json``).
"""

import json
import random
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drawbar.cli import group
from runs import fit_in, largest_difference, losses

LLAMA_FACTORY = """\
model_name_or_path: tiny-olmo
do_train: true
finetuning_type: full
dataset_dir: data
template: olmo
cutoff_len: 64
logging_steps: 1
save_strategy: 'no'
report_to: none
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
lr_scheduler_type: cosine
warmup_steps: 2
max_steps: 5
max_grad_norm: 0.5
weight_decay: 0.1
disable_shuffling: true
disable_gradient_checkpointing: true
"""
AXOLOTL = """\
base_model: tiny-olmo
sequence_len: 64
micro_batch_size: 8
gradient_accumulation_steps: 1
max_steps: 5
learning_rate: 1.0e-3
lr_scheduler: cosine
warmup_steps: 2
max_grad_norm: 0.5
weight_decay: 0.1
optimizer: adamw_torch
bf16: false
fp16: false
logging_steps: 1
save_strategy: steps
save_steps: 5
curriculum_sampling: true
val_set_size: 0
use_cpu: true
"""
"""Without accumulation, in which axolotl counts each micro-batch alike, however many tokens it has."""
PAIRS = "type: chat_template.default, field_messages: asked"
FILES = {
    "sft": f"{LLAMA_FACTORY}stage: sft\ndataset: chats\n",
    "dpo": f"{LLAMA_FACTORY}stage: dpo\ndataset: pairs\npref_beta: 0.2\npref_loss: sigmoid\n",
    "orpo": f"{LLAMA_FACTORY}stage: dpo\ndataset: pairs\npref_beta: 0.2\npref_loss: orpo\n",
    "simpo": f"{LLAMA_FACTORY}stage: dpo\ndataset: pairs\npref_beta: 2.0\npref_loss: simpo\nsimpo_gamma: 0.4\n",
    "axolotl_sft": f"{AXOLOTL}chat_template: tokenizer_default\n"
    "datasets: [{path: data/chats.json, ds_type: json, type: chat_template}]\n",
    "axolotl_completion": f"{AXOLOTL}datasets: [{{path: data/texts.json, ds_type: json, type: completion}}]\n",
    "axolotl_alpaca": f"{AXOLOTL}datasets: [{{path: data/facts.json, ds_type: json, type: alpaca}}]\n",
    "axolotl_dpo": f"{AXOLOTL}chat_template: tokenizer_default\nrl: dpo\nrl_beta: 0.2\n"
    f"datasets: [{{path: data/few.json, ds_type: json, {PAIRS}}}]\n",
}
"""Of two trainers, by the name of their output."""
LOSSES: dict[str, list[float]] = {
    "sft": [3.9650731, 3.9375975, 3.9085264, 3.8557847, 3.8488188],
    "dpo": [0.6931472, 0.6931472, 0.6805229, 0.6732799, 0.6895568],
    "orpo": [4.0511327, 4.1430521, 3.9786057, 3.927736, 3.9310973],
    "simpo": [0.963962, 1.1801401, 0.9636874, 1.015794, 0.9343632],
    "axolotl_sft": [3.9650726, 3.9375978, 3.9085262, 3.8557851, 3.8488188],
    "axolotl_completion": [3.9976847, 3.9806979, 3.8886902, 3.7863901, 3.8032537],
    "axolotl_alpaca": [3.9903829, 3.9139504, 3.8730404, 3.8217132, 3.7904494],
    "axolotl_dpo": [0.6931472, 0.6931472, 0.6369152, 0.5773681, 0.5411081],
}
TEMPLATE = """\
{{ eos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}{% else %}\
{{ '<|assistant|>\n' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
"""As LLaMA-Factory's ``olmo``."""
WORDS = [f"w{number}" for number in range(40)]
ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def write_job(folder: Path) -> None:
    """A tiny Llama whose weights follow from a formula, data, and a file for each kind of training."""
    specials = ["<|pad|>", "<|endoftext|>", "<|user|>", "<|assistant|>"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*specials, *WORDS])}, "<|pad|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|endoftext|>", extra_special_tokens=specials[2:]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tiny-olmo")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
                    bos_token_id=None, **sizes)
    )  # fmt: skip
    with torch.no_grad():
        for number, weight in enumerate(one for one in model.parameters() if one.dim() > 1):
            weight.copy_(0.2 * torch.sin(torch.arange(weight.numel()).double() * 12.9898 + number).view_as(weight))
    model.save_pretrained(folder / "tiny-olmo")
    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    def turn(role: str, words: int) -> dict[str, str]:
        return {"role": role, "content": text(words)}

    chats = [
        {"messages": [turn("user", 5), turn("assistant", 6), turn("user", 3), turn("assistant", 1 + number % 4)]}
        for number in range(40)
    ]
    pairs = [
        {"asked": [turn("user", 5)], "chosen": turn("assistant", 6), "rejected": turn("assistant", 1 + number % 4)}
        for number in range(40)
    ]
    texts = [{"text": text(6 + number % 9)} for number in range(40)]
    facts = [
        {"instruction": text(5), "input": text(3) if number % 2 else "", "output": text(2 + number % 5)}
        for number in range(40)
    ]
    columns = {"messages": "asked", "chosen": "chosen", "rejected": "rejected"}
    known: dict[str, Any] = {
        "chats": {"columns": {"messages": "messages"}},
        "pairs": {"columns": columns, "ranking": True},
    }
    data = {"chats": chats, "pairs": pairs, "few": pairs[:8], "texts": texts, "facts": facts}
    (folder / "data").mkdir()
    for name, records in data.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(records), encoding="utf-8")
    for name, about in known.items():
        about |= {"file_name": f"{name}.json", "formatting": "sharegpt", "tags": ROLES}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")
    for name, own in FILES.items():
        (folder / f"{name}.yaml").write_text(f"{own}output_dir: out/{name}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others")
    write_job(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_the_losses_are_those_of_the_other_trainer(name: str, job: Path) -> None:
    with chdir(job):
        Path("config.yaml").unlink(missing_ok=True)
        CliRunner().invoke(group, ["import", f"{name}.yaml", "--out", "config.yaml"], catch_exceptions=False)
    fit_in(job)
    found = losses(job / "out" / name)
    assert largest_difference(dict(enumerate(LOSSES[name], start=1)), found) < 1e-5


if __name__ == "__main__":
    write_job(Path(sys.argv[1]))
