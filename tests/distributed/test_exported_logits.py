"""Acceptance: what is exported of a run, transformers computes the logits of that the ranks computed together."""

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import make_project
from drawbar.cli.arguments import load_run
from drawbar.commands.export_run import export_run
from drawbar.tasks.batch import Batch
from drawbar.tasks.causal_lm import CausalLM
from drawbar.train.checkpoint_export import ExportFormat
from harness import run_ranks
from runs import fit_in

pytestmark = pytest.mark.exhaustive

LAYOUTS = ("whole", "parts")
STRATEGIES = {
    "fsdp and tensor": ("parallel.strategy=fsdp", "parallel.tensor=2"),
    "pipeline and ddp": ("parallel.strategy=ddp", "parallel.pipeline=2"),
}
SETTINGS = (
    *("train.steps=3", "train.micro_batch=2", "checkpoint.every=null", "eval.every=null", "data.limit.validation=4"),
    "task.from_scratch.tie_word_embeddings=true",
)


class Logits(CausalLM):
    """Its predictions are the logits, with the tokens that they were computed from."""

    predicts = True

    def score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        return {}

    def forward(self, model: Any, batch: Batch) -> Any:
        return model(**batch.inputs)

    def predict(self, model: Any, batch: Batch) -> list[Any]:
        logits_BLV = model(**batch.inputs).logits.float()
        lengths = batch["attention_mask"].sum(1).tolist()
        rows = zip(batch["input_ids"], logits_BLV, lengths, strict=True)
        return [{"tokens": tokens[:end].tolist(), "logits": logits[:end].tolist()} for tokens, logits, end in rows]


def train(folder: str, parallel: tuple[str, ...]) -> None:
    for layout in LAYOUTS:
        place = (f"run.name={layout}", f"checkpoint.layout={layout}")
        fit_in(Path(folder), *SETTINGS, *parallel, *place, task=Logits)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transformers_computes_the_same_logits(tmp_path: Path, strategy: str) -> None:
    project = make_project(tmp_path)
    run_ranks(train, 4, str(project), STRATEGIES[strategy])
    for layout in LAYOUTS:
        with chdir(project):
            config = load_run(f"runs/{layout}", ("device=cpu",), Logits).config
            export_run(config, Logits, project / f"{layout}-model", None, ExportFormat(shard_size="20KB"))
        model = AutoModelForCausalLM.from_pretrained(project / f"{layout}-model")
        assert len(list((project / f"{layout}-model").glob("*.safetensors"))) > 2
        lines = (project / "runs" / layout / "eval" / "validation" / "predictions.jsonl").read_text().splitlines()
        found = [one for line in lines for one in _as_list(json.loads(line)["prediction"])]
        assert len(found) >= 4
        for prediction in found:
            with torch.no_grad():
                logits = model(torch.tensor([prediction["tokens"]])).logits[0]
            torch.testing.assert_close(logits, torch.tensor(prediction["logits"]), atol=1e-6, rtol=1e-6)


def _as_list(prediction: Any) -> list[Any]:
    """A record of several samples has a list of predictions."""
    return prediction if isinstance(prediction, list) else [prediction]
