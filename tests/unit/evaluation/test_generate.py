"""Text from a model: in a batch as alone, and from the command line."""

import copy
import json
from pathlib import Path

import pytest
import torch

from conftest import make_project
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.evaluation.text_generation import Sampling, generate_text
from drawbar.tasks.generation import generation_options
from harness import Finished, run_cli
from tiny import LENGTH, tiny_config, tiny_engine

PROMPTS = ["", "a", "the driver couples the load", "\n\n", "é", "the hill and the hill keeps"]
GREEDY = Sampling(max_new_tokens=12, temperature=0)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Rotary and learned positions: both must not count the padding."""
    return tiny_engine(tiny_config(request.param))


def texts(engine: Engine, prompts: list[str], sampling: Sampling = GREEDY) -> list[str]:
    return generate_text(engine, engine.task.tokenizer, prompts, sampling)


def test_a_batch_goes_on_as_each_prompt_alone(engine: Engine) -> None:
    together = texts(engine, PROMPTS)
    assert together == [texts(engine, [prompt])[0] for prompt in PROMPTS]
    assert len(set(together)) > 1  # the prompts matter


def test_greedy_is_the_likeliest_token_each_time(engine: Engine) -> None:
    """Against a loop without padding, batch or cache."""
    tokenizer = engine.task.tokenizer
    ids = list(tokenizer(PROMPTS[2])["input_ids"])
    start = len(ids)
    while len(ids) < start + GREEDY.max_new_tokens and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
        with torch.no_grad():
            ids.append(int(engine.module(torch.tensor([ids])).logits[0, -1].argmax()))
    assert texts(engine, [PROMPTS[2]]) == [tokenizer.decode(ids[start:], skip_special_tokens=True)]


def test_sampling_depends_on_the_seed_alone(engine: Engine) -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(texts(engine, PROMPTS[:2], Sampling(max_new_tokens=12, temperature=1.0, top_k=0)))
    assert found[0] == found[1] != found[2]


def test_one_choice_is_greedy(engine: Engine) -> None:
    assert texts(engine, PROMPTS, Sampling(max_new_tokens=12, temperature=2.0, top_k=1)) == texts(engine, PROMPTS)


def test_beams_find_what_is_more_likely(engine: Engine) -> None:
    found = {}
    for beams in (1, 8):
        options = generation_options(Sampling(max_new_tokens=4, temperature=0, beams=beams).section, None)
        with engine.inference() as model:
            ids = model.generate(torch.tensor([[5, 6, 7]]), pad_token_id=0, **options)
        with torch.no_grad():
            scores = engine.module(ids[:, :-1]).logits.log_softmax(-1)[0, 2:]
        found[beams] = float(scores.gather(1, ids[0, 3:, None]).sum())
    assert found[8] > found[1]


def test_a_model_without_generate(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(tiny_config())
    engine.executor.module = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="Linear cannot generate text"):
        texts(engine, PROMPTS, Sampling(max_new_tokens=400))
    assert "leaves room for" not in caplog.text  # nothing is said of texts before that


def test_an_empty_prompt_where_no_token_begins_a_text(engine: Engine) -> None:
    tokenizer = copy.deepcopy(engine.task.tokenizer)
    tokenizer.bos_token = tokenizer.eos_token = None
    for prompts in ([""], ["the hill", ""]):
        with pytest.raises(UserError, match=f"prompt {len(prompts)} has no tokens, and the tokenizer has none"):
            generate_text(engine, tokenizer, prompts, GREEDY)


def test_a_prompt_that_the_model_has_no_positions_for(engine: Engine) -> None:
    with pytest.raises(UserError, match=f"prompt 2 has {LENGTH + 1} tokens, and the model {LENGTH} positions") as wrong:
        texts(engine, ["a", "x" * (LENGTH + 1)])
    assert "--max-new-tokens 12" in str(wrong.value.remedy)


def test_texts_end_with_the_models_positions(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.module.generation_config, "eos_token_id", None)
    prompts, endless = ["a", "x" * LENGTH], Sampling(max_new_tokens=400, temperature=0)
    written = texts(engine, prompts, endless)
    assert f"the model has {LENGTH} positions" in caplog.text
    assert "the longest prompt leaves room for 1 of --max-new-tokens 400" in caplog.text
    fitting = [Sampling(max_new_tokens=LENGTH + 1 - len(prompt), temperature=0) for prompt in prompts]
    assert written == [texts(engine, [prompt], most)[0] for prompt, most in zip(prompts, fitting, strict=True)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best checkpoint is its first, as the largest loss is the best one here."""
    project = make_project(tmp_path_factory.mktemp("trained"))
    done = run_cli(
        "train",
        "config.yaml",
        "train.steps=60",
        "eval.every=20",
        "eval.mode=max",
        "checkpoint.every=20",
        "data.test=valid.txt",
        cwd=project,
    )
    assert done.code == 0, done.err
    return project


def generate(project: Path, *arguments: str) -> Finished:
    return run_cli("generate", "runs/tiny", "--max-new-tokens", "40", *arguments, cwd=project)


@pytest.mark.exhaustive
def test_a_run_without_a_best_checkpoint_gives_its_latest(project: Path) -> None:
    settings = ("data.validation=null", "eval.every=null", "train.steps=3")
    assert run_cli("train", "config.yaml", *settings, cwd=project).code == 0
    assert generate(project).code == 0
    assert generate(project, "--checkpoint", "best").code == 2


def test_generate_from_a_checkpoint(trained: Path) -> None:
    outputs = {}
    for checkpoint in (None, "best", "latest", "20", "60"):
        which = () if checkpoint is None else ("--checkpoint", checkpoint)
        done = generate(trained, "--prompt", "the ", "--temperature", "1.5", "--top-k", "0", *which)
        assert done.code == 0, done.err
        assert done.out.startswith("the ")
        outputs[checkpoint] = done.out
    assert outputs[None] == outputs["best"] == outputs["20"] != outputs["60"] == outputs["latest"]
    best = json.loads((trained / "runs" / "tiny" / "checkpoints" / "best.json").read_text())
    assert best["step"] == 20
    missing = generate(trained, "--checkpoint", "5")
    assert missing.code == 2
    assert "20, 40, 60" in missing.err


def test_prompts_from_a_file(trained: Path) -> None:
    (trained / "prompts.txt").write_text("the driver\n\nthe é\n", encoding="utf-8")
    done = generate(trained, "--prompt", "a load", "--input", "prompts.txt", "--seed", "3")
    assert done.code == 0, done.err
    parts = done.out.split("-" * 40 + "\n")
    assert [part[: len(prompt)] for part, prompt in zip(parts, ("a load", "the driver", "the é"), strict=True)] == [
        "a load",
        "the driver",
        "the é",
    ]
    again = generate(trained, "--prompt", "a load", "--input", "prompts.txt", "--seed", "3")
    assert again.out == done.out
    assert generate(trained).code == 0  # without a prompt: the beginning of a document


def test_prompts_that_cannot_be_read(trained: Path) -> None:
    (trained / "prompts.jsonl").write_text('{"question": "why?"}\n')
    (trained / "empty.txt").write_text("")
    for file, place in (
        ("prompts.jsonl", "prompts.jsonl:1"),
        ("empty.txt", "empty.txt"),
        ("missing.txt", "missing.txt"),
    ):
        done = generate(trained, "--input", file)
        assert done.code == 2
        assert place in done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize("checkpoint", ["best", "latest", "20"])
def test_eval_of_a_checkpoint(trained: Path, checkpoint: str) -> None:
    run = trained / "runs" / "tiny"
    arguments = ("runs/tiny", "--split", "test", "--checkpoint", checkpoint, "eval.micro_batch=2")
    done = run_cli("eval", *arguments, cwd=trained)
    assert done.code == 0, done.err
    step = 60 if checkpoint == "latest" else 20
    found = json.loads((run / "eval" / "test" / "scores.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    written = next(line for line in lines if line["step"] == step and "eval/validation/loss" in line)
    assert found.pop("step") == step
    assert found.pop("records") == len((trained / "valid.txt").read_text().splitlines())
    assert {f"eval/validation/{name}": value for name, value in found.items()} == pytest.approx(
        {name: value for name, value in written.items() if name.startswith("eval/")}, rel=1e-6
    )  # the test data is the validation data
    assert f"{found['loss']:.3f}" in done.out


def test_a_model_that_cannot_write(trained: Path) -> None:
    (trained / "points.py").write_text(POINTS)
    settings = ("task.type=points:Points", "data.train=points.jsonl", "data.validation=null", "train.steps=1")
    (trained / "points.jsonl").write_text('{"x": [1.0, 2.0], "labels": 1}\n' * 8)
    common = ("run.name=points", "train.global_batch=4", "precision=fp32", "device=cpu", "tracking.tensorboard=false")
    done = run_cli("train", *settings, *common, cwd=trained)
    assert done.code == 0, done.err
    done = run_cli("generate", "runs/points", "--checkpoint", "latest", cwd=trained)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "this run's task has no tokenizer" in done.err


POINTS = """
import torch
import drawbar


class Points(drawbar.Task):
    def build_model(self):
        return torch.nn.Linear(2, 2)

    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum")
"""


def test_an_encoder_decoder_is_refused() -> None:
    """Its generate gives answers without the prompts, and positions that padding on the left would move."""
    engine = tiny_engine(tiny_config())
    engine.meta_model.config.is_encoder_decoder = True
    with pytest.raises(UserError, match="is an encoder-decoder") as refused:
        texts(engine, ["a"])
    assert "drawbar predict" in str(refused.value.remedy)
