"""Cutting a model into stages: which blocks go where, and that the stages one after another are the model."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from drawbar.errors import UserError
from drawbar.models.plans import plan_for
from drawbar.parallel.model_plan import PipelinePlan
from drawbar.parallel.pipeline.stages import LocalStages, _balanced, blocks_of_stages, build_stage, is_tied
from drawbar.runtime.safetensors_reader import parameters_on_meta
from exhaustive import some

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 5}
SIZES |= {"vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0, "initializer_range": 0.2}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 4},
    "qwen2": {**GROUPED, **SLIDING},  # full attention in the first blocks, and a window in the last
    "qwen3": {**GROUPED, "head_dim": 4},
    "glm": {**GROUPED, "head_dim": 4},
    "phi": SIZES,
    "gpt_neox": SIZES,
    "gpt2": {"n_embd": 16, "n_layer": 5, "n_head": 4, "vocab_size": 40, "n_positions": 32, "initializer_range": 0.2},
}


def tiny(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family], **fields)).eval()


def pipeline_plan(model: nn.Module) -> PipelinePlan:
    plan = plan_for(model).pipeline
    assert plan is not None
    return plan


def in_turn(stages: Sequence[nn.Module], **inputs: Any) -> torch.Tensor:
    hidden: tuple[torch.Tensor, ...] = ()
    for stage in stages:
        hidden = (stage(*hidden, **inputs),)
    return hidden[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", some(FAMILIES, 8))
def test_the_stages_one_after_another_are_the_model(family: str, tied: bool) -> None:
    model = tiny(family, tie_word_embeddings=tied)
    plan = pipeline_plan(model)
    stages = [build_stage(model, plan, [2, 1, 2], stage) for stage in range(3)]
    ids_BL = torch.arange(24).view(2, 12)
    mask_BL = (torch.arange(12) < torch.tensor([[12], [9]])).long()
    inputs = {"input_ids": ids_BL, "attention_mask": mask_BL}

    expected, found = model(**inputs).logits, in_turn(stages, **inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)

    expected.square().sum().backward()
    found.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in LocalStages(stages, model, plan).named_parameters():
        assert parameter.grad is not None
        gradients[name] = gradients.get(name, 0) + parameter.grad  # a tied weight is in two stages
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is not None
        assert torch.linalg.norm(gradients[name] - gradient) <= 1e-5 * torch.linalg.norm(gradient) + 1e-6, name


def test_every_block_is_in_one_stage_under_its_own_name_and_numbered_for_its_own_cache() -> None:
    model = tiny("qwen2")
    plan = pipeline_plan(model)
    stages: list[Any] = [build_stage(model, plan, [2, 1, 2], stage) for stage in range(3)]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert [[name for name, _ in stage.model.layers.named_children()] for stage in stages] == [
        ["0", "1"],
        ["2"],
        ["3", "4"],
    ]
    assert [[block.self_attn.layer_idx for block in stage.model.layers] for stage in stages] == [[0, 1], [0], [0, 1]]
    assert [stage.config.num_hidden_layers for stage in stages] == [2, 1, 2]
    assert [set(stage.config.layer_types) for stage in stages] == [{"full_attention"}] * 2 + [{"sliding_attention"}]
    assert model.config.num_hidden_layers == 5


def test_a_tied_weight_goes_by_its_one_name_and_a_stage_holds_nothing_of_others() -> None:
    with parameters_on_meta():
        model = tiny("llama", tie_word_embeddings=True)
    plan = pipeline_plan(model)
    assert is_tied(model, plan)
    first, middle, last = (LocalStages([build_stage(model, plan, [2, 1, 2], stage)], model, plan) for stage in range(3))
    assert "model.embed_tokens.weight" in dict(first.named_parameters())
    assert {name.split(".")[2] for name, _ in middle.named_parameters()} == {"2"}
    assert "model.embed_tokens.weight" in dict(last.named_parameters())
    assert "lm_head.weight" not in {**dict(last.named_parameters()), **last.state_dict()}
    assert last.get_output_embeddings().weight is dict(last.named_parameters())["model.embed_tokens.weight"]
    assert all(parameter.is_meta for parameter in last.parameters())


def test_cuts_are_balanced_by_parameters_or_as_given() -> None:
    model = tiny("llama", tie_word_embeddings=False)
    plan = pipeline_plan(model)
    assert blocks_of_stages(model, plan, 5, None) == [1, 1, 1, 1, 1]
    assert blocks_of_stages(model, plan, 3, None) == [2, 2, 1]
    assert blocks_of_stages(model, plan, 3, [1, 3, 1]) == [1, 3, 1]
    torch.manual_seed(0)
    large = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**GROUPED, "vocab_size": 400}))
    assert blocks_of_stages(large, plan, 3, None) == [1, 3, 1]  # embedding and head weigh as much as three blocks


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_smaller_sum_of_squares(sizes: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(sizes)))

    def cost(cuts: Sequence[int]) -> int:
        starts = [0, *(sum(cuts[: number + 1]) for number in range(len(cuts)))]
        return sum(sum(sizes[start:stop]) ** 2 for start, stop in pairwise(starts))

    found = _balanced(sizes, stages)
    assert len(found) == stages
    assert min(found) > 0
    assert sum(found) == len(sizes)
    every = (
        [stop - start for start, stop in pairwise([0, *inner, len(sizes)])]
        for inner in combinations(range(1, len(sizes)), stages - 1)
    )
    assert cost(found) == min(map(cost, every))


@pytest.mark.parametrize(
    ("stages", "cuts", "problem"),
    [
        (6, None, "the model has 5 blocks, which is too few for 6 stages"),
        (2, [2, 2], r"the cuts \[2, 2\] are 2 stages with 4 blocks; there are 2 stages, and the model has 5 blocks"),
        (2, [2, 2, 1], r"the cuts \[2, 2, 1\] are 3 stages with 5 blocks; there are 2 stages"),
    ],
)
def test_what_cannot_be_cut_is_refused(stages: int, cuts: list[int] | None, problem: str) -> None:
    model = tiny("llama")
    with pytest.raises(UserError, match=problem):
        blocks_of_stages(model, pipeline_plan(model), stages, cuts)
