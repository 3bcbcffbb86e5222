"""A chat model from the command line: trained by a template of one's own, asked, exported and asked again."""

import json
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

import drawbar
from drawbar.cli.chat import chat
from drawbar.errors import UserError
from harness import Finished, run_cli
from messages import check_one_message

TEMPLATE = """\
{%- for message in messages %}
    {{- '[' + message.role + ']' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
"""
CONFIG = """
run: {name: chat}
task:
  from_scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2}
  tokenizer: {train: byte_bpe, vocab_size: 280}
  messages_column: messages
  chat_template: chat.jinja
  generation: {max_new_tokens: 20}
  metrics: [exact_match]
data: {train: train.jsonl, test: test.jsonl, sequence_length: 64}
train: {global_batch: 8, steps: 40}
optim: {lr: 1.0e-2}
precision: fp32
device: cpu
tracking: {tensorboard: false}
"""
PLAIN = """
run: {name: chat}
task:
  from_scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2}
  tokenizer: {train: byte_bpe, vocab_size: 257}
data: {train: train.jsonl, sequence_length: 64}
train: {global_batch: 8, steps: 1}
device: cpu
tracking: {tensorboard: false}
"""
PREFERRED = """
run: {name: preferred}
task: {type: preference, model: runs/chat}
data: {train: pairs.jsonl, validation: pairs.jsonl, sequence_length: 64}
train: {global_batch: 8, steps: 1}
eval: {samples: ["is yes yes?"], sample_tokens: 20}
optim: {lr: 1.0e-6}
precision: fp32
device: cpu
tracking: {tensorboard: false}
"""
SYSTEM = {"role": "system", "content": "be brief"}
GREEDY = ("--temperature", "0", "--max-new-tokens", "20")


def question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run that has learned to say yes and no, and to stop."""
    folder = tmp_path_factory.mktemp("chat")
    answers = ["yes", "no"] * 16
    chats = [[SYSTEM, question(f"is {a} {a}?"), {"role": "assistant", "content": a}] for a in answers]
    (folder / "train.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "test.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats[:2]))
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "config.yaml").write_text(CONFIG)
    done = run_cli("train", "config.yaml", cwd=folder)
    assert done.code == 0, done.err
    (folder / "chat.jinja").unlink()  # the run has it
    return folder


def generate(project: Path, *arguments: str, code: int = 0) -> Finished:
    done = run_cli("generate", "runs/chat", *GREEDY, *arguments, cwd=project)
    assert done.code == code, done.err
    return done


def test_a_chat_model_answers_and_stops(project: Path) -> None:
    chat = json.dumps([SYSTEM, question("is no no?")])
    done = generate(project, "--prompt", "is yes yes?", "--prompt", chat)
    assert done.out == f"is yes yes?\nyes\n{'-' * 40}\n{chat}\nno\n"
    done = generate(project, "--raw", "--prompt", "[user]is yes yes?")
    assert done.out.startswith("[user]is yes yes?")
    assert "\nyes\n" not in done.out


def test_chats_from_a_file_are_answered_as_in_a_prediction(project: Path) -> None:
    """What the file says in answer is no part of the question."""
    generate(project, "--input", "test.jsonl", "--output", "texts.jsonl", "--overwrite")
    found = [json.loads(line) for line in (project / "texts.jsonl").read_text().splitlines()]
    assert [line["text"] for line in found] == ["yes", "no"]
    assert found[0]["prompt"][-1]["content"] == "yes"
    done = run_cli("predict", "runs/chat", "--input", "test.jsonl", "--output", "p.jsonl", cwd=project)
    assert done.code == 0, done.err
    predicted = [json.loads(line)["prediction"] for line in (project / "p.jsonl").read_text().splitlines()]
    assert predicted == ["yes", "no"]
    done = run_cli("eval", "runs/chat", "--split", "test", cwd=project)
    assert done.code == 0, done.err
    assert json.loads((project / "runs/chat/eval/test/scores.json").read_text())["exact_match"] == 1


def talk(project: Path, lines: str, *arguments: str, run: str = "chat") -> list[str]:
    with chdir(project):
        done = CliRunner().invoke(chat, [f"runs/{run}", *GREEDY, *arguments], input=lines, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout.splitlines()


def test_a_chat_goes_on_from_what_was_said(project: Path) -> None:
    with chdir(project):
        model = drawbar.load_run("runs/chat")
        asked = [SYSTEM, question("is yes yes?"), {"role": "assistant", "content": "yes"}, question("is no no?")]
        (after_another,) = model.generate(asked, temperature=0.0, max_new_tokens=20)
        parts: list[str] = []
        assert model.generate(asked, parts.append, temperature=0.0, max_new_tokens=20) == [after_another]
    assert "".join(parts) == after_another
    found = talk(project, "is yes yes?\n\nis no no?\n/new\nis no no?\n/exit\nis no no?\n", "--system", "be brief")
    assert found == ["yes", *after_another.splitlines(), "no"]


def test_a_model_that_has_learned_no_chats_continues_each_line(project: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(PLAIN)
    (tmp_path / "train.jsonl").write_text('{"text": "yes or no"}\n' * 9)
    done = run_cli("train", "config.yaml", cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(talk(tmp_path, "yes\nno\n", "--max-new-tokens", "1")) >= 2
    with chdir(tmp_path), pytest.raises(UserError, match="has learned no chats"):
        CliRunner().invoke(chat, ["runs/chat", "--system", "x"], catch_exceptions=False)


def test_a_model_that_has_learned_preferences_among_chats_is_asked_so(project: Path) -> None:
    pairs = [
        {"prompt": [SYSTEM, question(f"is {good} {good}?")], "chosen": good, "rejected": bad}
        for good, bad in (("yes", "no"), ("no", "yes")) * 4
    ]
    (project / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (project / "preferred.yaml").write_text(PREFERRED)
    done = run_cli("train", "preferred.yaml", cwd=project)
    assert done.code == 0, done.err
    (sample,) = (project / "runs/preferred/eval/validation/samples.jsonl").read_text().splitlines()
    assert {name: json.loads(sample)[name] for name in ("prompt", "text")} == {"prompt": "is yes yes?", "text": "yes"}
    done = run_cli("generate", "runs/preferred", *GREEDY, "--prompt", "is no no?", "--input", "test.jsonl", cwd=project)
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if line in ("yes", "no")] == ["no", "yes", "no"]
    assert talk(project, "is yes yes?\n", "--system", "be brief", run="preferred") == ["yes"]


def test_nobody_asks(project: Path) -> None:
    done = generate(project, code=2)
    check_one_message(done.out + done.err, "answers prompts, but there is no prompt", "--prompt", "--raw")
    done = generate(project, "--prompt", '[{"role": "user"}]', code=2)
    check_one_message(done.out + done.err, "message of the user has no content")


def test_the_exported_folder_answers_alone(project: Path) -> None:
    done = run_cli("export", "runs/chat", "--to", "exported", cwd=project)
    assert done.code == 0, done.err
    model = AutoModelForCausalLM.from_pretrained(project / "exported")
    tokenizer = AutoTokenizer.from_pretrained(project / "exported")
    asked = [SYSTEM, question("is no no?")]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(written) == f"no{tokenizer.eos_token}"
