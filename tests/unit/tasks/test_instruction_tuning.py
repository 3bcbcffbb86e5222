"""causal_lm on prompts with completions, and on chats: the loss is that of the answers alone."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import CausalLMConfig, GenerationSection, PretrainedTaskConfig, Seq2SeqConfig
from drawbar.data.dataset import EncodedDataset, encode_records
from drawbar.data.tokenizer import load_tokenizer, train_byte_bpe, wrap_texts
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.chat import ChatFormat
from drawbar.tasks.messages import Chat, alpaca_prompt
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.seq2seq import Seq2Seq
from drawbar.tasks.task_context import TaskContext
from drawbar.train.setup import build_task

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
END = "<|endoftext|>"
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
}
PROMPTS: dict[str, Any] = {"prompt_column": "prompt", "completion_column": "completion"}
CHATS: dict[str, Any] = {"messages_column": "messages"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """With a chat template, from a folder."""
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    made = wrap_texts(train_byte_bpe(["the load and the engine"] * 9, 270), "begin")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return load_tokenizer(folder)


def task_of(made: Any, options: dict[str, Any], sequence_length: int = 128, **more: Any) -> CausalLM:
    config = CausalLMConfig(from_scratch=LLAMA, **options, **more)
    return CausalLM(TaskContext(RunConfig(task=config, data=DataSection(sequence_length=sequence_length)), made))


def parts(task: CausalLM, record: dict[str, Any]) -> list[tuple[bool, str]]:
    """What is read and what is learned, in turns."""
    (sample,) = task.encode(record, True) or []
    runs: list[tuple[bool, list[int]]] = []
    for token, label in zip(sample["input_ids"], sample["labels"], strict=True):
        assert label in (token, -100)
        if not runs or runs[-1][0] is not (label != -100):
            runs.append((label != -100, []))
        runs[-1][1].append(token)
    return [(target, task.tokenizer.decode(tokens)) for target, tokens in runs]


def chat(*contents: str, roles: tuple[str, ...] = ("user", "assistant")) -> dict[str, Any]:
    return {"messages": [{"role": roles[n % len(roles)], "content": text} for n, text in enumerate(contents)]}


@pytest.mark.parametrize("given", [{}, {"input": None}, {"input": ""}, {"input": "1 1"}])
def test_alpacas_records_have_its_text_with_or_without_an_input(given: dict[str, Any], tokenizer: Any) -> None:
    task = task_of(tokenizer, {"prompt_column": "instruction", "completion_column": "output"}, 512)
    (_, prompt), (_, answer) = parts(task, {"instruction": "Add.", "output": "2", **given})
    assert prompt == END + alpaca_prompt("Add.", given.get("input"))
    assert answer == f"2{END}"


def test_the_completion_and_its_end_are_the_targets(tokenizer: Any) -> None:
    end = tokenizer.eos_token
    found = parts(task_of(tokenizer, PROMPTS), {"prompt": "the load: ", "completion": "an engine"})
    assert found == [(False, f"{end}the load: "), (True, f"an engine{end}")]


def test_an_empty_prompt_has_a_first_token() -> None:
    """As of GPT-2, which puts no token before a text."""
    bare = train_byte_bpe(["the load and the engine"] * 9, 280)
    found = parts(task_of(bare, PROMPTS), {"prompt": "", "completion": "an engine"})
    assert found == [(False, bare.eos_token), (True, f"an engine{bare.eos_token}")]


def test_columns_inside_a_column(tokenizer: Any) -> None:
    task = task_of(tokenizer, {"prompt_column": "qa.question", "completion_column": "qa.answer"})
    record = {"qa": {"question": "the load: ", "answer": "an engine"}}
    assert parts(task, record)[-1][1].startswith("an engine")
    assert task.references([record]) == ["an engine"]


def test_the_assistants_turns_are_the_targets(tokenizer: Any) -> None:
    record = chat("one?", "1", "two?", "2", "bye")
    found = parts(task_of(tokenizer, CHATS), record)
    assert found == [
        (False, "[user]one?;[assistant]"),
        (True, "1;"),
        (False, "[user]two?;[assistant]"),
        (True, "2;"),
        (False, "[user]bye;"),
    ]
    whole = tokenizer.apply_chat_template(record["messages"], tokenize=False)
    assert "".join(text for _, text in found) == whole


def test_the_last_answer_alone_can_be_the_target(tokenizer: Any) -> None:
    found = parts(task_of(tokenizer, CHATS, answers="last"), chat("one?", "1", "two?", "2", "bye"))
    assert found == [(False, "[user]one?;[assistant]1;[user]two?;[assistant]"), (True, "2;"), (False, "[user]bye;")]


def test_a_system_message_is_read(tokenizer: Any) -> None:
    found = parts(task_of(tokenizer, CHATS), chat("be brief", "one?", "1", roles=("system", "user", "assistant")))
    # this template has no end token of its own
    assert found == [(False, "[system]be brief;[user]one?;[assistant]"), (True, f"1;{END}")]


def test_tools_and_a_system_column_are_read_in_training_and_prediction(tokenizer: Any) -> None:
    task = task_of(tokenizer, CHATS, chat_template="{{ tools | map(attribute='name') | join }};" + TEMPLATE)
    task.tokenizer.chat_template = task.config.chat_template
    record = {**chat("one?", "1"), "tools": '[{"name": "add"}]', "system": "be brief", "id": 3}
    read = "add;[system]be brief;[user]one?;[assistant]"
    assert parts(task, record) == [(False, read), (True, f"1;{END}")]
    assert task.references([record]) == ["1;"]
    assert task.parts_read(record) == {"messages": True, "tools": True, "system": True, "id": False}
    task.has_labels = False
    (sample,) = task.encode(record, False) or []
    assert task.tokenizer.decode(sample["input_ids"]) == read
    task.tokenizer.chat_template = TEMPLATE
    assert task.parts_read(record) == {"messages": True, "tools": False, "system": True, "id": False}
    said = {**chat("hm", "one?", "1", roles=("system", "user", "assistant")), "system": "be brief", "documents": ["a"]}
    assert task.parts_read(said) == {"messages": True, "system": False, "documents": False}


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({}, {"text"}),
        (PROMPTS, {"prompt", "completion"}),
        ({"prompt_column": "qa.question", "completion_column": "completion"}, {"qa", "completion"}),
    ],
)
def test_columns_that_are_not_read_are_known(options: dict[str, Any], read: set[str], tokenizer: Any) -> None:
    record = {"text": "a", "prompt": "b", "completion": "c", "qa": {"question": "d"}, "label": 1, "weight": 0.5}
    assert task_of(tokenizer, options).parts_read(record) == {column: column in read for column in record}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (chat("one?", roles=("user",)), "no message of the assistant, only of: user"),
        ({"messages": []}, "the chat has no messages"),
        ({"messages": "one?"}, "is str, not list"),
        ({"messages": [{"role": "assistant", "text": "1"}]}, "message of the assistant has no content"),
        ({"messages": ["one?"]}, "'one\\?' is no message"),
        ({"messages": [{"content": "1"}]}, "is no message"),
    ],
)
def test_a_bad_chat_is_refused(record: dict[str, Any], message: str, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=message):
        task_of(tokenizer, CHATS).encode(record, True)


def test_chats_need_a_template() -> None:
    with pytest.raises(UserError, match=r"no chat template[\s\S]*prompt_column"):
        task_of(train_byte_bpe([], 257), CHATS).encode(chat("a", "b"), True)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_column": "prompt"},
        {"completion_column": "completion"},
        {**PROMPTS, **CHATS},
        {"generation": GenerationSection()},
        {"chat_template": TEMPLATE},
        {**PROMPTS, "answers": "last"},
        {**CHATS, "chat_template": "nowhere.jinja"},
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"where: task\."):
        task_of(tokenizer, {"tokenizer": tokenizer.name_or_path, **options}).build_tokenizer()


def test_what_is_too_long_is_cut_and_a_prompt_alone_dropped(tokenizer: Any) -> None:
    record = {"prompt": "xyzw", "completion": "xyzwxyzw"}
    (sample,) = task_of(tokenizer, PROMPTS, sequence_length=8).encode(record, True) or []
    assert (len(sample["input_ids"]), sample["truncated"]) == (8, True)
    assert sum(label != -100 for label in sample["labels"]) == 3
    assert task_of(tokenizer, PROMPTS, sequence_length=5).encode(record, True) is None


def test_of_a_long_chat_the_answers_survive_that_fit(tokenizer: Any) -> None:
    record = chat("a", "1", "b", "2")
    assert [text for target, text in parts(task_of(tokenizer, CHATS), record) if target] == ["1;", f"2;{END}"]
    ids, _ = ChatFormat(tokenizer).encode(Chat(record["messages"]), "all")
    first_alone = task_of(tokenizer, CHATS, sequence_length=len(ids) - 3)
    (sample,) = first_alone.encode(record, True) or []
    assert sample["truncated"]
    assert [text for target, text in parts(first_alone, record) if target] == ["1;"]
    assert first_alone.references([record]) == ["1;"]  # which is what it is asked for
    last = task_of(tokenizer, CHATS, sequence_length=len(ids) - 3, answers="last")
    whole = {"messages": record["messages"][:2]}
    found = encode_records([record, whole], lambda one: last.encode(one, True), describe=str)
    assert (len(found), found.dropped) == (1, 1)


@pytest.mark.parametrize("options", [PROMPTS, CHATS])
def test_no_answer_is_asked_for_to_half_a_prompt(options: dict[str, Any], tokenizer: Any) -> None:
    task = task_of(tokenizer, options, sequence_length=8)
    task.has_labels = False
    assert task.encode({"prompt": "xyzw" * 4, **chat("xyzw" * 4)}, False) is None


@pytest.mark.parametrize("as_file", [True, False])
def test_a_template_of_ones_own_stays_with_the_tokenizer(as_file: bool, tokenizer: Any, tmp_path: Path) -> None:
    own = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (tmp_path / "own.jinja").write_text(own)
    setting = str(tmp_path / "own.jinja") if as_file else own
    task = task_of(None, CHATS, tokenizer=tokenizer.name_or_path, chat_template=setting)
    task.build_tokenizer().save_pretrained(tmp_path / "saved")
    task.tokenizer = load_tokenizer(str(tmp_path / "saved"))
    assert task.tokenizer.chat_template == own
    assert parts(task, chat("a", "b")) == [(False, f"<user>a{END}<assistant>"), (True, f"b{END}")]
    (sample,) = task.encode(chat("a", "b"), True) or []
    assert sample["labels"][-1] == task.tokenizer.eos_token_id  # and not its letters


def test_a_model_stops_with_the_end_token_of_the_template(tokenizer: Any, tmp_path: Path) -> None:
    """Here, and where it is exported to."""
    own = load_tokenizer(tokenizer.name_or_path)
    own.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    own.split_special_tokens = False
    own.chat_template = TEMPLATE.replace(";", "<|end|>")
    task = task_of(own, CHATS)
    for model in (task.build_model(), task.build_meta_model()):
        assert model.generation_config.eos_token_id == [own.eos_token_id, own.convert_tokens_to_ids("<|end|>")]
    assert task_of(tokenizer, PROMPTS).build_model().generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_model_is_built_whose_template_cannot_be_trained_with(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A new run ends at once, with one message. That of a run may write texts, or be exported."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ messages[0]['content'] }}{{ messages[-1]['content'] }}"
    with pytest.raises(UserError, match="the chat template cannot write a question with its answer"):
        task_of(own, CHATS).build_model()
    assert not caplog.records
    context = replace(task_of(own, CHATS).task_context, has_checkpoint=True)
    assert CausalLM(context).build_model().generation_config.eos_token_id == own.eos_token_id
    assert "the chat template cannot write a question with its answer" in caplog.text


def test_a_tokenizer_is_trained_on_what_is_said() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    parted = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert task_of(None, CHATS).texts({"messages": [parted, call, *chat("c")["messages"]]}) == ["ab", "", "c"]


def test_a_prompt_alone_can_be_predicted_for(tokenizer: Any) -> None:
    task = task_of(tokenizer, PROMPTS)
    task.has_labels = False
    assert parts(task, {"prompt": "the load: "}) == [(False, f"{tokenizer.eos_token}the load: ")]
    chats = task_of(tokenizer, CHATS)
    chats.has_labels = False
    asked = chat("one?", "1", "two?")
    read = "".join(text for _, text in parts(chats, asked))
    assert read == tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)


def encoded(task: CausalLM, records: list[dict[str, Any]]) -> EncodedDataset:
    return encode_records(records, lambda record: task.encode(record, False), describe=str)


def model_of(task: CausalLM) -> nn.Module:
    torch.manual_seed(0)
    return task.build_model().eval()


def written(task: CausalLM, model: nn.Module, prompt: list[int]) -> str:
    """By the model itself, on the bare prompt."""
    tokens = torch.tensor([prompt])
    found = model.generate(tokens, do_sample=False, max_new_tokens=8, pad_token_id=0)
    return task.tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True)


@pytest.mark.parametrize("has_labels", [True, False])
def test_predictions_go_on_from_bare_prompts(has_labels: bool, tokenizer: Any) -> None:
    task = task_of(tokenizer, PROMPTS, generation=GenerationSection(max_new_tokens=8))
    task.has_labels = has_labels
    model = model_of(task)
    records = [{"prompt": text, "completion": "done"} for text in ("a", "the load and the engine: ", "what, and")]
    samples = encoded(task, records)
    found = task.predict(model, task.collate([samples[number] for number in range(3)]))
    bare = [tokenizer(record["prompt"])["input_ids"] for record in records]
    assert found == [written(task, model, prompt) for prompt in bare]
    assert len(set(found)) > 1
    assert task.references(records) == ["done"] * 3


@pytest.mark.parametrize("has_labels", [True, False])
def test_an_answer_is_written_to_what_came_before_the_last_one(has_labels: bool, tokenizer: Any) -> None:
    task = task_of(tokenizer, CHATS, generation=GenerationSection(max_new_tokens=8))
    task.has_labels = has_labels
    model = model_of(task)
    asked = [chat("one?"), chat("one?", "1", "two, and three?")]
    full = [chat("one?", "1"), chat("one?", "1", "two, and three?", "2 3", "thanks")]
    samples = encoded(task, full if has_labels else asked)
    found = task.predict(model, task.collate([samples[number] for number in range(2)]))
    prompts = [
        tokenizer.apply_chat_template(one["messages"], tokenize=False, add_generation_prompt=True) for one in asked
    ]
    bare = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    assert found == [written(task, model, prompt) for prompt in bare]
    # not what the user says last; and as the template has it, since so does whatever is compared with it
    assert task.references(full) == ["1;", "2 3;"]


def test_the_loss_of_a_batch_is_that_of_its_answers(tokenizer: Any, tmp_path: Path) -> None:
    task = task_of(tokenizer, PROMPTS)
    model = model_of(task)
    records = [{"prompt": "the load: ", "completion": "ab"}, {"prompt": "x", "completion": "and the engine"}]
    samples = encoded(task, records)
    batch = task.collate([samples[0], samples[1]])
    found = task.loss(task.forward(model, batch), batch).item()
    expected, count = 0.0, 0
    for record in records:
        prompt = tokenizer(record["prompt"])["input_ids"]
        completion = tokenizer(record["completion"], add_special_tokens=False)["input_ids"]
        answer = [*completion, tokenizer.eos_token_id]
        logits = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        expected -= sum(logits[len(prompt) + n - 1, token].item() for n, token in enumerate(answer))
        count += len(answer)
    assert task.num_targets(batch) == count
    assert found == pytest.approx(expected, rel=1e-5)
    assert "bits_per_byte" not in task.loss_scores(found, count, records)


def test_the_length_that_a_prompt_needs(tokenizer: PreTrainedTokenizerFast) -> None:
    """It is the first at which a record gives a sample, and the shortest of those that were dropped."""
    records = [{"prompt": text, "completion": "ab"} for text in ("xyzw" * 5, "xyzw" * 2)]
    task = task_of(tokenizer, PROMPTS, sequence_length=4)
    assert [task.encode(record, True) for record in records] == [None, None]
    needed = int(task.needed_length)
    assert task_of(tokenizer, PROMPTS, sequence_length=needed - 1).encode(records[1], True) is None
    assert task_of(tokenizer, PROMPTS, sequence_length=needed).encode(records[1], True)


@pytest.mark.parametrize(
    ("task_type", "options"),
    [
        (CausalLM, CausalLMConfig(from_scratch=LLAMA, **PROMPTS)),
        (CausalLM, CausalLMConfig(from_scratch=LLAMA, **CHATS)),
        (Seq2Seq, Seq2SeqConfig(model="t5", from_scratch={"d_model": 16})),
    ],
    ids=["prompts", "chats", "seq2seq"],
)
def test_a_tokenizer_without_an_end_token_is_warned_of_once(
    task_type: type[PretrainedTask],
    options: PretrainedTaskConfig,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    endless.save_pretrained(tmp_path)
    world = Distributed(RankInfo(), torch.device("cpu"), timeout=60)
    for folder, warnings in ((tokenizer.name_or_path, 0), (str(tmp_path), 1)):
        caplog.clear()
        config = RunConfig(task=options.model_copy(update={"tokenizer": folder}))
        build_task(task_type, config, world, tmp_path / "run")
        assert caplog.text.count("will not learn to stop") == warnings
