"""The tasks ``preference`` and ``reward``: their losses, what they read, and what must not change them."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

import drawbar
from drawbar.data.tokenizer import set_option, train_byte_bpe
from drawbar.errors import UserError
from drawbar.tasks.preference import Preference, Reward, dpo_loss, ipo_loss, kto_loss, orpo_loss, simpo_loss
from drawbar.tasks.task_context import TaskContext
from harness import run_cli
from runs import AtStep, delete, fit_in, losses, scores, weights

CONFIG = """\
run: {name: one}
task: {type: preference, model: model}
data: {train: pairs.jsonl, validation: valid.jsonl, sequence_length: 32}
train: {global_batch: 4, micro_batch: 4, steps: 3}
optim: {name: sgd, lr: 0.2, schedule: constant}
precision: fp32
device: cpu
tracking: {log_every: 1, tensorboard: false}
"""
KTO = ("task.method=kto", "data.train=judged.jsonl", "data.validation=judged.jsonl")
METHODS = {
    "dpo": (),
    "ipo": ("task.method=ipo",),
    "orpo": ("task.method=orpo",),
    "simpo": ("task.method=simpo",),
    "kto": KTO,
    "reward": ("task.type=reward", "task.model=scorer"),
}
PAIRS = [
    {"prompt": "the load", "chosen": " pulls the engine", "rejected": " and"},
    {"prompt": "an engine pulls", "chosen": " the load", "rejected": " the the the the load and the engine"},
    {"prompt": "the", "chosen": " engine", "rejected": " load pulls"},
    {"prompt": "and the engine and the", "chosen": " load pulls", "rejected": " an engine pulls"},
    {"prompt": "load", "chosen": " and engine pull the load", "rejected": " the"},
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data and a configuration."""
    folder = tmp_path_factory.mktemp("preference")
    tokenizer = train_byte_bpe(["the load and an engine pulls the load"] * 9, 290, {"pad_token": "<|pad|>"})
    set_option(tokenizer, "split_special_tokens", False)
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id, max_position_embeddings=64, num_labels=1, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    for name, auto in (("model", AutoModelForCausalLM), ("scorer", AutoModelForSequenceClassification)):
        auto.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_lines(folder / "pairs.jsonl", PAIRS)
    write_lines(folder / "valid.jsonl", PAIRS[:3])
    judged = [
        {"prompt": one["prompt"], "completion": one["chosen" if good else "rejected"], "label": good}
        for one, good in zip(PAIRS, (True, False, False, True, True), strict=True)
    ]
    write_lines(folder / "judged.jsonl", judged)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return folder


def log_probability(folder: Path, prompt: str, answer: str) -> tuple[float, int]:
    """Of an answer and its end token, by the pretrained model alone; and the number of its tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "model"), train_tokenizer(folder)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    tokens = torch.tensor([*before, *after, tokenizer.eos_token_id])
    with torch.no_grad():
        logps_LV = log_softmax(model(tokens[None]).logits[0].double(), dim=-1)
    picked = [logps_LV[place - 1, tokens[place]].item() for place in range(len(before), len(tokens))]
    return math.fsum(picked), len(picked)


def train_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "model")


def made_task(folder: Path, *settings: str) -> Preference:
    loaded = drawbar.load_config(folder / "config.yaml", [f"task.model={folder / 'model'}", *settings])
    return Preference(TaskContext(loaded.config, train_tokenizer(folder), {"chats": False}))


@pytest.mark.parametrize("method", ["orpo", "simpo"])
def test_the_first_loss_is_that_of_the_papers(method: str, folder: Path) -> None:
    """Without a reference model; those with one begin at a constant, and are compared with TRL."""
    fit_in(folder, *METHODS[method], f"run.name=paper-{method}", "train.steps=1", "train.global_batch=5",
           "train.micro_batch=5")  # fmt: skip
    wanted = []
    for one in PAIRS:
        sums = [log_probability(folder, one["prompt"], one[name]) for name in ("chosen", "rejected")]
        better, worse = (total / length for total, length in sums)
        if method == "simpo":
            wanted.append(-math.log(1 / (1 + math.exp(-(0.1 * (better - worse) - 0.5)))))
        else:
            odds = [math.log(math.exp(mean) / (1 - math.exp(mean))) for mean in (better, worse)]
            wanted.append(-better - 0.1 * math.log(1 / (1 + math.exp(odds[1] - odds[0]))))
    assert losses(folder / "runs" / f"paper-{method}")[1] == pytest.approx(np.mean(wanted), abs=1e-5)


def test_formulas() -> None:
    better, worse = torch.tensor([-3.0, -1.0]), torch.tensor([-5.0, 2.0])
    sigmoid = torch.sigmoid(0.1 * (better - worse))
    torch.testing.assert_close(dpo_loss(better, worse, 0.1), -sigmoid.log())
    torch.testing.assert_close(dpo_loss(better, worse, 0.1, 0.2), -0.8 * sigmoid.log() - 0.2 * (1 - sigmoid).log())
    torch.testing.assert_close(ipo_loss(better, worse, 0.1), torch.tensor([9.0, 64.0]))
    torch.testing.assert_close(simpo_loss(better, worse, 2.0, 1.0), -torch.sigmoid(torch.tensor([3.0, -7.0])).log())
    good = torch.tensor([True, False])
    margins = torch.tensor([0.1 * (-3 - 2), 0.1 * (2 - -1)])
    wanted = torch.tensor([1.5, 0.5]) * (1 - torch.sigmoid(margins))
    torch.testing.assert_close(kto_loss(better, good, torch.tensor(2.0), 0.1, 1.5, 0.5), wanted)
    torch.testing.assert_close(
        kto_loss(better, good, torch.tensor(-2.0), 0.1, 1, 1), kto_loss(better, good, torch.tensor(0.0), 0.1, 1, 1)
    )
    assert orpo_loss(torch.tensor([0.0]), torch.tensor([-1.0]), 0.1).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_what_shares_a_batch_changes_nothing(method: str, folder: Path) -> None:
    names = {
        "whole": (),
        "alone": ("train.micro_batch=1", "eval.micro_batch=1"),
        "padded": ("data.padding_free=false",),
    }
    for name, settings in names.items():
        fit_in(folder, *METHODS[method], *settings, f"run.name={method}-{name}")
    whole, *others = (folder / "runs" / f"{method}-{name}" for name in names)
    assert len(set(losses(whole).values())) == 3  # it learned
    for other in others:
        assert losses(other) == pytest.approx(losses(whole), rel=1e-5)
        assert scores(other)[3] == pytest.approx(scores(whole)[3], rel=1e-4, abs=1e-5)
        for key, tensor in weights(whole, 3).items():
            torch.testing.assert_close(weights(other, 3)[key], tensor, rtol=0, atol=1e-5)


def test_packed_rows_hold_whole_pairs(folder: Path) -> None:
    packed = ("data.batching=packed", "train.global_batch=1", "train.micro_batch=1", "train.steps=1")
    fit_in(folder, "task.method=orpo", *packed, "run.name=packed", "data.sequence_length=64")
    fit_in(folder, "task.method=orpo", "train.global_batch=5", "train.micro_batch=5", "train.steps=1", "run.name=all")
    runs = folder / "runs"
    assert losses(runs / "packed")[1] == pytest.approx(losses(runs / "all")[1], abs=1e-6)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_resumed_run_asks_its_own_reference(method: str, folder: Path) -> None:
    """And no other, where the file with its answers is lost or damaged."""
    for name, step in (("through", 4), ("halved", 2)):
        fit_in(folder, *METHODS[method], f"run.name={method}-{name}", f"train.steps={step}")
    path = folder / "runs" / f"{method}-halved" / "reference-train.safetensors"
    kept = path.read_bytes()
    for damage in (lambda: path.unlink(), lambda: path.write_bytes(kept[:100])):
        damage()
        with pytest.raises(UserError, match="what the reference model said is lost"):
            fit_in(folder, *METHODS[method], f"run.name={method}-halved", "train.steps=4")
    path.write_bytes(kept)
    fit_in(folder, *METHODS[method], f"run.name={method}-halved", "train.steps=4")
    assert losses(folder / "runs" / f"{method}-halved") == losses(folder / "runs" / f"{method}-through")


def taught(folder: Path, name: str, *settings: str) -> None:
    """A language model of 4 steps, and the name of its run for forks."""
    write_lines(folder / "texts.jsonl", [{"text": one["prompt"] + one["chosen"]} for one in PAIRS])
    of_texts = ("task.type=causal_lm", "data.train=texts.jsonl", "data.validation=null", f"run.name={name}")
    fit_in(folder, *of_texts, "train.steps=4", *settings)


def test_the_reference_of_a_fork_is_where_its_checkpoints_are(folder: Path) -> None:
    """In the store, from which another machine goes on, and in the directory of a run that has lost its own."""
    taught(folder, "base")
    loaded = ("run.name=base", "data.validation=null")
    fit_in(folder, *loaded, "train.steps=10", fork="whole")
    whole = losses(folder / "runs" / "whole")
    remote = f"checkpoint.remote={(folder / 'store').as_uri()}"
    fit_in(folder, *loaded, remote, "train.steps=6", fork="moved")
    shutil.rmtree(folder / "runs" / "moved")
    fit_in(folder, "data.validation=null", remote, "run.name=moved", "train.steps=8")
    found = losses(folder / "runs" / "moved")
    assert {step: found[step] for step in (7, 8)} == {step: whole[step] for step in (7, 8)}
    deletes = AtStep(6, lambda: delete(folder / "runs" / "gone"))
    with pytest.raises(UserError, match="gone"):
        fit_in(folder, *loaded, "checkpoint.every=8", "train.steps=10", fork="gone", callbacks=[deletes])
    (rescued,) = (folder / "runs").glob("gone-rescued*")
    fit_in(folder, "data.validation=null", "checkpoint.every=8", f"run.name={rescued.name}", "train.steps=10")
    found = losses(rescued)
    assert 10 in found
    assert found == {step: whole[step] for step in found}


def test_a_reference_is_the_weights_and_not_their_average(folder: Path) -> None:
    taught(folder, "averaged", "optim.ema=0.9", "optim.lr=0.01")
    fit_in(folder, "run.name=averaged", "optim.ema=0.9", "optim.lr=0.01", "train.steps=5", "data.validation=null",
           fork="averaged-on")  # fmt: skip
    assert losses(folder / "runs" / "averaged-on")[5] == pytest.approx(math.log(2), abs=1e-6)


def reference_of(run: Path) -> list[float]:
    return load_file(run / "reference-train.safetensors")["reference_0"].tolist()


def other_model(folder: Path, name: str) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
    model.save_pretrained(folder / name)
    train_tokenizer(folder).save_pretrained(folder / name)
    return folder / name


def test_a_fork_compares_with_what_it_begins_with(folder: Path) -> None:
    """Of a run without a reference model; a fork of one that has such keeps it."""
    taught(folder, "taught")
    loaded = ("run.name=taught", "train.steps=6", "data.validation=null")
    assert fit_in(folder, *loaded, fork="forked").progress.step == 6
    first = losses(folder / "runs" / "forked")[5]
    assert first == pytest.approx(math.log(2), abs=1e-6)
    fit_in(folder, "task.model=runs/taught@latest", "run.name=begun", "data.validation=null", "train.steps=1")
    assert reference_of(folder / "runs" / "forked") == pytest.approx(reference_of(folder / "runs" / "begun"), abs=1e-4)
    fit_in(folder, "run.name=forked", "train.steps=8", "data.validation=null", fork="again")
    assert reference_of(folder / "runs" / "again") == reference_of(folder / "runs" / "forked")


def test_a_model_that_changed_in_place_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    shutil.copytree(folder / "model", folder / "swapped")

    run = ("task.model=swapped", "run.name=swapped")
    fit_in(folder, *run)
    before = reference_of(folder / "runs" / "swapped")
    shutil.rmtree(folder / "runs" / "swapped" / "checkpoints")  # as if it had failed before the first
    shutil.rmtree(folder / "swapped")
    other_model(folder, "swapped")
    fit_in(folder, *run)
    assert losses(folder / "runs" / "swapped")[1] == pytest.approx(math.log(2), abs=1e-6)
    assert reference_of(folder / "runs" / "swapped") != pytest.approx(before, abs=1e-2)
    shutil.rmtree(folder / "swapped")
    shutil.copytree(folder / "model", folder / "swapped")
    done = run_cli("predict", "runs/swapped", "--input", "pairs.jsonl", "--output", "p.jsonl", cwd=folder)
    assert done.code == 1
    assert "task.model is not the model that this run's training started from" in done.err


def test_commands_ask_the_reference_of_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    fit_in(folder, "run.name=scored")
    trained = scores(folder / "runs" / "scored")[3]
    evaluated = run_cli("eval", "runs/scored", "--split", "test", "data.test=valid.jsonl", cwd=folder)
    assert evaluated.code == 0, evaluated.err
    found = json.loads((folder / "runs" / "scored" / "eval" / "test" / "scores.json").read_text())
    for name in ("loss", "accuracy", "margin"):
        assert found[name] == pytest.approx(trained[f"eval/validation/{name}"], abs=1e-6)
    done = run_cli(
        "predict", "runs/scored", "--input", "valid.jsonl", "--output", str(tmp_path / "p.jsonl"), cwd=folder
    )
    assert done.code == 0, done.err
    rewards = [json.loads(line)["prediction"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    margin = np.mean([one["chosen"] - one["rejected"] for one in rewards])
    assert margin == pytest.approx(trained["eval/validation/margin"], abs=1e-6)
    run = drawbar.load_run("runs/scored")
    assert run.evaluate()["margin"] == pytest.approx(margin, abs=1e-6)
    with pytest.raises(UserError, match="needs the model that training started from"):
        run.predict([PAIRS[0]])


def test_a_reward_model_scores_single_answers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    fit_in(folder, *METHODS["reward"], "run.name=scorer")
    write_lines(tmp_path / "one.jsonl", [{"prompt": one["prompt"], "chosen": one["rejected"]} for one in PAIRS[:3]])
    for name, source in (("pairs", folder / "valid.jsonl"), ("one", tmp_path / "one.jsonl")):
        output = str(tmp_path / f"{name}-scored.jsonl")
        done = run_cli("predict", "runs/scorer", "--input", str(source), "--output", output, cwd=folder)
        assert done.code == 0, done.err
    of_one = [json.loads(line)["prediction"] for line in (tmp_path / "one-scored.jsonl").read_text().splitlines()]
    run = drawbar.load_run("runs/scorer")
    exported = AutoModelForSequenceClassification.from_pretrained(export(folder, "scorer", tmp_path))
    tokenizer = train_tokenizer(folder)
    for one, score in zip(PAIRS[:3], of_one, strict=True):
        tokens = tokenizer(one["prompt"] + one["rejected"] + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        assert exported.eval()(tokens).logits.item() == pytest.approx(score, abs=1e-5)
        assert run.predict([{"prompt": one["prompt"], "chosen": one["rejected"]}]) == [pytest.approx(score, abs=1e-6)]


def export(folder: Path, run: str, to: Path) -> Path:
    done = run_cli("export", f"runs/{run}", "--to", str(to / "exported"), cwd=folder)
    assert done.code == 0, done.err
    return to / "exported"


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [{"role": "user", "content": "the load"}], "chosen": [{"role": "assistant", "content": "engine"}],
         "rejected": [{"role": "assistant", "content": "and"}]},
        {"chosen": [{"role": "user", "content": "the load"}, {"role": "assistant", "content": "engine"}],
         "rejected": [{"role": "user", "content": "the load"}, {"role": "assistant", "content": "and"}]},
        {"prompt": "the load", "chosen": [{"from": "human", "value": "the load"}, {"from": "gpt", "value": "engine"}],
         "rejected": [{"from": "human", "value": "the load"}, {"from": "gpt", "value": "and"}]},
        {"prompt": "the load", "chosen": [{"role": "assistant", "content": "engine"}],
         "rejected": [{"role": "assistant", "content": "and"}]},
        {"prompt": "the load", "chosen": [{"from": "chatgpt", "value": "engine"}],
         "rejected": [{"from": "bot", "value": "and"}]},
        {"prompt": [{"role": "user", "content": "the load"}],
         "chosen": [{"role": "user", "content": "the load"}, {"role": "assistant", "content": "engine"}],
         "rejected": [{"from": "human", "value": "the load"}, {"from": "gpt", "value": "and"}]},
        {"prompt": None, "chosen": [{"from": "human", "value": "the load"}, {"from": "gpt", "value": "engine"}],
         "rejected": [{"from": "human", "value": "the load"}, {"from": "gpt", "value": "and"}]},
        {"prompt": [{"from": "human", "value": "the load"}],
         "chosen": {"from": "gpt", "value": "engine"}, "rejected": {"from": "gpt", "value": "and"}},
        {"prompt": [{"role": "user", "content": "the load"}], "chosen": "engine", "rejected": "and"},
    ],
    ids=["messages", "whole chats", "ShareGPT", "a text and messages", "other names", "the prompt twice", "null",
         "one message", "its text"],
)  # fmt: skip
def test_chats_in_the_forms_of_public_data(record: dict[str, Any], folder: Path) -> None:
    write_lines(folder / "chat.jsonl", [record])
    task = made_task(folder, f"data.train={folder / 'chat.jsonl'}")
    task.__dict__["dataset_metadata"] = task.find_dataset_metadata()
    sample = task.encode(record, train=True)
    assert sample is not None
    tokenizer, labels = train_tokenizer(folder), np.asarray(sample["labels"])
    text = tokenizer.decode(sample["input_ids"])
    asked = "<|user|>the load<|endoftext|><|assistant|>"
    assert text == f"{asked}engine<|endoftext|>{asked}and<|endoftext|>"
    assert tokenizer.decode(labels[labels >= 0]) == "engine<|endoftext|>and<|endoftext|>"


def test_a_question_stands_behind_a_system_message(folder: Path) -> None:
    task = made_task(folder, "data.sequence_length=64")
    task.__dict__["dataset_metadata"] = {"chats": True}
    answer = [{"role": "system", "content": "an"}, {"role": "assistant", "content": "engine"}]
    sample = task.encode({"prompt": "the load", "chosen": answer, "rejected": answer}, train=True)
    assert sample is not None
    text = train_tokenizer(folder).decode(sample["input_ids"][task.parts_of(sample)["chosen"]])
    assert text == "<|system|>an<|endoftext|><|user|>the load<|endoftext|><|assistant|>engine<|endoftext|>"


def texts_of(folder: Path, name: str, rows: list[dict[str, Any]], *settings: str) -> list[list[str]]:
    """The sequences of each training sample."""
    write_lines(folder / f"{name}.jsonl", rows)
    paths = [f"data.train={folder / name}.jsonl", "data.validation=null", f"task.model={folder / 'model'}"]
    loaded = drawbar.load_config(folder / "config.yaml", [*paths, "data.on_bad_record=skip", *settings])
    context = TaskContext(loaded.config, train_tokenizer(folder))
    task = Reward(context) if "task.type=reward" in settings else Preference(context)
    found = []
    for record in task.records("train"):
        sample = task.encode(record, train=True)
        assert sample is not None
        found.append([train_tokenizer(folder).decode(sample["input_ids"][at]) for at in task.parts_of(sample).values()])
    return found


def test_columns_inside_of_columns(folder: Path) -> None:
    nested = [
        {"meta": {"prompt": one["prompt"]}, "chosen": one["chosen"], "rejected": one["rejected"]} for one in PAIRS
    ]
    settings = ("task.prompt_column=meta.prompt",)
    assert texts_of(folder, "nested", nested, "task.type=reward", *settings) == texts_of(folder, "flat", PAIRS)
    judged = [{"prompt": one["prompt"], "out": {"text": one["chosen"]}, "label": True} for one in PAIRS]
    flat = [{"prompt": one["prompt"], "completion": one["chosen"], "label": True} for one in PAIRS]
    found = texts_of(folder, "out", judged, "task.method=kto", "task.completion_column=out.text")
    assert found == texts_of(folder, "out-flat", flat, "task.method=kto")
    assert [other for _, other in found] == [
        f"{one['prompt']}{before['chosen']}<|endoftext|>"
        for one, before in zip(PAIRS, [PAIRS[-1], *PAIRS[:-1]], strict=True)
    ]
    with pytest.raises(UserError, match="the record has no 'promt'"):
        texts_of(folder, "typo", PAIRS, "task.type=reward", "task.prompt_column=promt")


def test_whole_texts_begin_with_their_prompt(folder: Path) -> None:
    """Only what differs is learned."""
    task = made_task(folder, "task.prompt_column=null")
    record = {"chosen": "the load and an engine", "rejected": "the load and along"}
    sample = task.encode(record, train=True)
    assert sample is not None
    labels = np.asarray(sample["labels"])
    assert train_tokenizer(folder).decode(labels[labels >= 0]) == " an engine<|endoftext|> along<|endoftext|>"
    assert task.prompt_of(record) == "the load and"
    assert task.encode({"chosen": "engine", "rejected": "and"}, train=True) is not None


def test_labels_of_tables_are_texts(folder: Path) -> None:
    task = made_task(folder, "task.method=kto")
    for label, is_good in (("1", True), ("0", False), ("True", True), ("false", False), (1.0, True), (0, False)):
        sample = task.encode({"prompt": "the", "completion": " load", "label": label}, train=True)
        assert sample is not None
        assert sample["is_good"] is is_good
    with pytest.raises(UserError, match="neither true nor false"):
        task.encode({"prompt": "the", "completion": " load", "label": "2"}, train=True)


def test_a_chat_gets_the_answer_to_another_question(folder: Path) -> None:
    def chat(question: str, answer: str) -> dict[str, Any]:
        asked = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"completion": asked, "label": True}

    found = texts_of(folder, "chats", [chat("the", "load"), chat("an", "engine")], "task.method=kto")
    assert found[1][1] == "<|user|>an<|endoftext|><|assistant|>load<|endoftext|>"
    single = [
        {"prompt": [{"role": "user", "content": question}], "completion": answer, "label": True}
        for question, answer in (("the", "load"), ("an", "engine"))
    ]
    assert texts_of(folder, "single", single, "task.method=kto") == found


def test_a_bad_record_spoils_no_other(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "the", "completion": " load", "label": True} for _ in range(4)]
    rows[1]["completion"] = 5
    write_lines(folder / "spoilt.jsonl", rows)
    settings = ("task.method=kto", "data.train=spoilt.jsonl", "data.validation=null", "data.on_bad_record=skip")
    fit_in(folder, *settings, "run.name=spoilt", "train.global_batch=3", "train.micro_batch=3", "train.steps=1")
    said = capfd.readouterr().err
    assert "3 samples of 3 records (1 bad)" in said
    assert "spoilt.jsonl:2: 'completion' is int, not str" in said


def test_a_long_answer_is_cut_and_a_long_prompt_is_dropped(folder: Path) -> None:
    task = made_task(folder, "data.sequence_length=8")
    long = " the engine" * 9
    sample = task.encode({"prompt": "the load", "chosen": long, "rejected": " and"}, train=True)
    assert sample is not None
    assert sample["truncated"]
    assert task.parts_of(sample)["chosen"] == slice(0, 8)
    assert task.encode({"prompt": long, "chosen": " and", "rejected": " the"}, train=True) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("data.streaming=true",), "a stream has no end"),
        (("task.method=ipo", "task.label_smoothing=0.1"), "which ipo does not know"),
        (("task.metrics=[accuracy]",), "has scores of its own"),
        (
            (
                "task.model=opt",
                "task.tokenizer=model",
                "task.from_scratch={hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}",
            ),
            "name a model of another family",
        ),
        (("task.chosen_column=better",), "the record has no 'better'; it has 'prompt', 'chosen', 'rejected'"),
        ((*KTO, "task.label_column=completion"), "is ' pulls the engine', neither true nor false"),
        (
            (*KTO, "data.train=[{files: judged.jsonl, weight: 1}, {files: judged.jsonl, weight: 2}]"),
            "leave the weights",
        ),
    ],
)
def test_what_is_refused(settings: tuple[str, ...], message: str, folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        fit_in(folder, *settings, "run.name=refused")
    assert message in f"{refused.value.what}\n{refused.value.remedy}"
    assert not (folder / "runs" / "refused").exists()
