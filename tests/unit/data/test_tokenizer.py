import ctypes
import http.server
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from drawbar.data.tokenizer import (
    END_OF_TEXT,
    Wrapping,
    check_wrapping_is_saved,
    load_tokenizer,
    special_tokens_around,
    train_byte_bpe,
    wrap_texts,
)
from drawbar.distributed.interrupt import exit_on_signal
from drawbar.errors import UserError
from harness import run_ranks, wait_until

TEXTS = ["def lossless(text):\n    return text\n"] * 5 + ["the text, the whole text and nothing but the text"] * 5


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_byte_bpe(TEXTS, 280)


def test_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 280
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert len(tokenizer("the text")["input_ids"]) < len("the text")


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_loses_nothing(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    "text", ["", " a", "a ", " don 't , stop . ", "\r\n\t\x00", f"a{END_OF_TEXT}b", "é😀 \u2028 e\u0301", "\ufeff"]
)
def test_round_trip_of_awkward_texts(tokenizer: PreTrainedTokenizerFast, text: str, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, load_tokenizer(str(tmp_path))):
        tokens = one(text)["input_ids"]
        assert one.decode(tokens) == one.decode(tokens, skip_special_tokens=True) == text
        assert one.eos_token_id not in tokens  # only we end a document


def test_training_is_deterministic(tokenizer: PreTrainedTokenizerFast) -> None:
    assert train_byte_bpe(iter(TEXTS), 280).get_vocab() == tokenizer.get_vocab()


def test_too_little_text_gives_a_smaller_vocabulary(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert 257 <= len(train_byte_bpe(["abc abc"], 4096)) < 270
    assert "fewer than the 4096 asked for" in caplog.text


def test_loaded_from_a_folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("wrapping", "one", "two"),
    [
        ("begin", "<|endoftext|>a", "<|endoftext|>a<|endoftext|>b"),
        ("end", "a<|endoftext|>", "a<|endoftext|>b<|endoftext|>"),
        ("begin_end", "<|endoftext|>a<|endoftext|>", "<|endoftext|>a<|endoftext|>b<|endoftext|>"),
        ("none", "a", "ab"),
    ],
)
def test_a_tokenizer_wraps_texts_wherever_it_is_loaded(wrapping: Wrapping, one: str, two: str, tmp_path: Path) -> None:
    wrapped = wrap_texts(train_byte_bpe([], 257), wrapping)
    check_wrapping_is_saved(wrapped)
    wrapped.save_pretrained(tmp_path)
    for tokenizer in (wrapped, load_tokenizer(str(tmp_path))):
        assert tokenizer.decode(tokenizer("a")["input_ids"]) == one
        assert tokenizer.decode(tokenizer("a", "b")["input_ids"]) == two
        assert set(tokenizer("a", "b")) == {"input_ids", "attention_mask"}
        before, after = special_tokens_around(tokenizer)
        assert tokenizer.decode([*before, *tokenizer("a", add_special_tokens=False)["input_ids"], *after]) == one


def test_a_tokenizer_whose_class_wraps_texts_takes_no_other_special_tokens() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]
    bert = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}, bos_token="a", eos_token="b")
    with pytest.raises(UserError, match=r"has its own special tokens[\s\S]*task.add_special_tokens=auto"):
        check_wrapping_is_saved(wrap_texts(bert, "begin"))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": '{"model_type": "gpt2"}'},
        {"config.json": '{"model_type": "t5"}'},
        {"config.json": '{"model_type": "llama"}', "tokenizer.json": "{broken"},
        {"tokenizer.json": '{"version": "1.0"}'},
    ],
)
def test_folder_without_a_tokenizer(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="holds no tokenizer that can be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in caught.value.what
    assert not caught.value.what.rstrip().endswith(":")
    assert "tokenizer.json" in str(caught.value.remedy)


BERT = {"tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}'}
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
GPT2 = {"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'}


@pytest.mark.parametrize(
    ("files", "file", "says"),
    [
        ({"tokenizer.json": "{broken"}, "tokenizer.json", "is not valid JSON"),
        (
            {"tokenizer.json": '{"version": "1.0", "model": {"vocab": {"a": 0, "b'},
            "tokenizer.json",
            "is not valid JSON",
        ),
        ({"tokenizer.json": ""}, "tokenizer.json", "is empty"),
        ({"tokenizer.json": "[]"}, "tokenizer.json", "holds no JSON object"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "tokenizer.json", "describes no model"),
        ({**BERT, "vocab.txt": ""}, "vocab.txt", "is empty"),
        ({**BERT, "vocab.txt": "\n\n"}, "vocab.txt", "is empty"),
        ({**BERT, "vocab.txt": "[UNK]\na\u00e4\n".encode("latin-1")}, "vocab.txt", "is not UTF-8 text"),
        ({**GPT2, "vocab.json": '{"a": 0, "b": 1}'}, "merges.txt", "is missing"),
        ({**GPT2, "vocab.json": '{"a": 0,', "merges.txt": "#version: 0.2\n"}, "vocab.json", "is not valid JSON"),
        (
            {"tokenizer_config.json": "{broken", "vocab.txt": "[UNK]\na\nb\n"},
            "tokenizer_config.json",
            "is not valid JSON",
        ),
        ({"tokenizer.json": LFS}, "tokenizer.json", "is a Git LFS pointer"),
        ({**BERT, "vocab.txt": LFS}, "vocab.txt", "is a Git LFS pointer"),  # else a vocabulary of three lines
        ({"tokenizer.json": "<!DOCTYPE html><html>Sign in</html>"}, "tokenizer.json", "is a page of HTML"),
    ],
)
def test_a_broken_file_of_a_tokenizer_is_named(
    tmp_path: Path, files: dict[str, str | bytes], file: str, says: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(tmp_path))
    assert f"the folder {tmp_path} holds no tokenizer that can be loaded: {file} {says}" in caught.value.what
    assert caught.value.where == str(tmp_path / file)
    hint = "git lfs pull" if says.endswith("pointer") else "download" if says.endswith("HTML") else "save_pretrained"
    assert hint in str(caught.value.remedy)


@pytest.mark.parametrize(("files", "vocabulary"), [(BERT, "vocab.txt"), (GPT2, "vocab.json")])
def test_a_tokenizer_without_its_vocabulary(tmp_path: Path, files: dict[str, str], vocabulary: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"holds no tokenizer that can be loaded: [\s\S]*{vocabulary}"):
        load_tokenizer(str(tmp_path))


def test_a_file_of_a_tokenizer_in_place_of_its_folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match="is a file, and a tokenizer is a folder") as caught:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert str(tmp_path) in str(caught.value.remedy)


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "a/b/c", "not a name!"])
def test_neither_a_folder_nor_a_name(name: str) -> None:
    with pytest.raises(UserError, match="neither a folder on this machine nor a valid name"):
        load_tokenizer(name)


class FakeHub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub's protocol as a download needs: one repository, ``team/tokenizer``."""

    folder: Path

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if path == "/api/models/team/tokenizer":
            self.reply(200, json.dumps({"id": "team/tokenizer", "sha": "0" * 40}).encode(), {}, body)
        elif "/team/tokenizer/" not in path:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"}, body)
        elif "/resolve/" in path and (file := self.folder / path.rsplit("/", 1)[1]).is_file():
            self.reply(200, file.read_bytes(), {"ETag": f'"{file.name}"', "X-Repo-Commit": "0" * 40}, body)
        else:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "0" * 40}, body)

    def reply(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Iterator[http.server.ThreadingHTTPServer]:
    FakeHub.folder = tmp_path / "repository"
    tokenizer.save_pretrained(FakeHub.folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


ANSWER = """
import sys
from drawbar.data.tokenizer import load_tokenizer
from drawbar.errors import UserError
for name in sys.stdin:
    try:
        print(len(load_tokenizer(name.strip())), flush=True)
    except UserError as error:
        print(error.what, flush=True)
"""


@pytest.mark.exhaustive
def test_hub_and_its_cache(hub: http.server.ThreadingHTTPServer, tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))},
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",  # read once, when the library is imported
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", ANSWER]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        questions, answers = child.stdin, child.stdout
        assert questions
        assert answers

        def load(name: str) -> str:
            questions.write(f"{name}\n")
            questions.flush()
            return answers.readline()

        assert load("team/tokenizer") == "280\n"
        assert "team/tokeniser is neither a folder on this machine nor a repository" in load("team/tokeniser")
        hub.shutdown()
        hub.server_close()
        assert load("team/tokenizer") == "280\n"
        assert "'team/tokeniser' on this machine, and the Hugging Face Hub cannot be reached" in load("team/tokeniser")


def test_a_signal_is_heard_while_the_library_trains() -> None:
    assert run_ranks(be_told_in_training, 1) == [75]


def be_told_in_training() -> int:
    """The exit code of a process that is told to leave while the library is at work, as it is for minutes."""
    child = os.fork()
    if child == 0:
        with exit_on_signal():
            train_byte_bpe(long_work(), 280)
        os._exit(0)
    ended: list[int] = []

    def end() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] * (pid == child))
        return bool(ended)

    try:
        wait_until(end, "the end of the process", seconds=20)
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
    return ended[0]


def long_work() -> Iterator[str]:
    """No return from C, whatever signal comes: a lock that is taken twice."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    lock = ctypes.create_string_buffer(128)
    library = ctypes.CDLL(None)
    for _ in range(2):
        library.pthread_mutex_lock(lock)
    yield ""
