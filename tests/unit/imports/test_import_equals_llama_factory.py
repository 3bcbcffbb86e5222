"""An imported configuration trains as in LLaMA-Factory, whose losses stand here: it needs other versions than drawbar.

They are those of LLaMA-Factory 0.9.5 with transformers 5.6, TRL 0.24 and torch 2.13 on a CPU. To have it train anew:
``PYTHONPATH=tests python tests/unit/imports/test_import_equals_llama_factory.py FOLDER``, then in this folder
``llamafactory-cli train sft.yaml`` and the like; the losses are in ``saves/*/trainer_log.jsonl``.
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

COMMON = """\
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
FILES = {
    "sft": "stage: sft\ndataset: chats\n",
    "dpo": "stage: dpo\ndataset: pairs\npref_beta: 0.2\npref_loss: sigmoid\n",
    "orpo": "stage: dpo\ndataset: pairs\npref_beta: 0.2\npref_loss: orpo\n",
    "simpo": "stage: dpo\ndataset: pairs\npref_beta: 2.0\npref_loss: simpo\nsimpo_gamma: 0.4\n",
}
LOSSES: dict[str, list[float]] = {
    "sft": [3.9650731, 3.9375975, 3.9085264, 3.8557847, 3.8488188],
    "dpo": [0.6931472, 0.6931472, 0.6805229, 0.6732799, 0.6895568],
    "orpo": [4.0511327, 4.1430521, 3.9786057, 3.927736, 3.9310973],
    "simpo": [0.963962, 1.1801401, 0.9636874, 1.015794, 0.9343632],
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
    columns = {"messages": "asked", "chosen": "chosen", "rejected": "rejected"}
    known: dict[str, Any] = {
        "chats": {"columns": {"messages": "messages"}},
        "pairs": {"columns": columns, "ranking": True},
    }
    for name, records in (("chats", chats), ("pairs", pairs)):
        known[name] |= {"file_name": f"{name}.json", "formatting": "sharegpt", "tags": ROLES}
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / f"{name}.json").write_text(json.dumps(records), encoding="utf-8")
    (folder / "data" / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")
    for name, own in FILES.items():
        (folder / f"{name}.yaml").write_text(f"{COMMON}{own}output_dir: saves/{name}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-factory")
    write_job(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_the_losses_are_those_of_llama_factory(name: str, job: Path) -> None:
    with chdir(job):
        Path("config.yaml").unlink(missing_ok=True)
        CliRunner().invoke(group, ["import", f"{name}.yaml", "--out", "config.yaml"], catch_exceptions=False)
    fit_in(job)
    found = losses(job / "saves" / name)
    assert largest_difference(dict(enumerate(LOSSES[name], start=1)), found) < 1e-5


if __name__ == "__main__":
    write_job(Path(sys.argv[1]))
