"""A base in few bits, and moments in 8 bits, on one CUDA device: the numbers of the CPU."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drawbar.config.schema.run_config import CausalLMConfig, LoraSection, OptimSection
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.models.stored_base import FORMS
from tiny import ARCHITECTURES, CPU, random_step, tiny_config, tiny_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
WIDE = {**ARCHITECTURES["llama"], "hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize("form", list(FORMS))
def test_losses_are_those_of_the_cpu(tmp_path: Path, form: str) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=257, **WIDE)).save_pretrained(tmp_path)
    config = tiny_config(lora=LoraSection(base=form, modules="linear", dora=True))
    config = config.model_copy(update={"task": CausalLMConfig(model=str(tmp_path))})
    found = []
    for device in (CPU, CUDA):
        engine = tiny_engine(config, Distributed(RankInfo(), device, timeout=60))
        found.append([float(engine.train_step(random_step(engine, seed)).loss) for seed in range(5)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_moments_in_8_bits_are_those_of_the_cpu() -> None:
    config = tiny_config(fields=WIDE, optim=OptimSection(lr=1e-3, schedule="constant", state_dtype="int8"))
    found = []
    for device in (CPU, CUDA):
        engine = tiny_engine(config, Distributed(RankInfo(), device, timeout=60))
        found.append([float(engine.train_step(random_step(engine, seed)).loss) for seed in range(5)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
