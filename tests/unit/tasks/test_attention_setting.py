"""`task.attention`: what transformers is asked for, and the error where it does not have it."""

from pathlib import Path

import pytest
from transformers import BertConfig, BertForMaskedLM

from drawbar.config.schema.run_config import RunConfig
from drawbar.config.schema.task_sections import SequenceClassificationConfig
from drawbar.errors import UserError
from drawbar.models.packed import allow_packing
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.classification import SequenceClassification
from drawbar.tasks.task_context import TaskContext
from tiny import tiny_config, tiny_task

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def task(attention: str, family: str = "llama") -> CausalLM:
    config = tiny_config(family)
    return tiny_task(config.model_copy(update={"task": config.task.model_copy(update={"attention": attention})}))


@pytest.mark.parametrize(
    ("attention", "gets"),
    [("auto", "sdpa"), ("sdpa", "sdpa"), ("eager", "eager"), ("flex_attention", "flex_attention")],
)
def test_the_model_gets_it(attention: str, gets: str) -> None:
    assert task(attention).build_model().config._attn_implementation == gets
    assert task(attention).build_meta_model().config._attn_implementation == gets


@pytest.mark.parametrize("attention", ["auto", "eager"])
def test_a_pretrained_model_gets_it(attention: str, tmp_path: Path) -> None:
    BertForMaskedLM(BertConfig(vocab_size=257, **SIZES)).save_pretrained(tmp_path)
    options = SequenceClassificationConfig(model=str(tmp_path), attention=attention, labels=["a", "b"])
    context = TaskContext(RunConfig(task=options), task("auto").tokenizer, {"labels": ["a", "b"]})
    model = SequenceClassification(context).build_model()
    assert model.config._attn_implementation == ("sdpa" if attention == "auto" else attention)
    allow_packing(model, per_sample=True)


@pytest.mark.parametrize(
    ("attention", "family", "says", "works"),
    [
        (
            "flash_attention_2",
            "gpt2",
            "gpt2 model cannot have flash_attention_2 attention on this machine",
            "sdpa, eager",
        ),
        ("flex_attention", "gpt2", "gpt2 model cannot have flex_attention", "sdpa, eager or auto"),
        ("flex_atention", "llama", "did you mean flex_attention?", "sdpa, eager, flex_attention or auto"),
    ],
)
def test_what_cannot_be_names_what_can(attention: str, family: str, says: str, works: str) -> None:
    with pytest.raises(UserError) as error:
        task(attention, family).build_model()
    assert says in error.value.what
    assert error.value.where == "task.attention"
    assert works in (error.value.remedy or "")


def test_other_errors_stay_what_they_are() -> None:
    config = tiny_config("llama", {"hidden_size": 15})
    wrong = tiny_task(config.model_copy(update={"task": config.task.model_copy(update={"attention": "eager"})}))
    with pytest.raises(UserError, match="cannot be built with these settings"):
        wrong.build_model()
