"""``drawbar export --push``, to a server that speaks the part of the Hub's protocol that an upload needs."""

import base64
import json
from collections.abc import Iterator
from contextlib import chdir
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from conftest import make_project
from drawbar.cli.arguments import load_run
from drawbar.commands.export_run import Push, export_run
from drawbar.errors import ExitCode, UserError
from drawbar.train.checkpoint_export import ExportFormat
from runs import fit_in


class Hub(ThreadingHTTPServer):
    """Keeps what is uploaded."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.refuses = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Requests(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuses:
            self._answer(403, {"error": "this token may only read"})
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(content))
            self._answer(200, {"url": f"{self.server.address}/me/tiny", "name": "me/tiny", "id": "1"})
        elif "/preupload/" in self.path:
            wanted = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(content)["files"]]
            self._answer(200, {"files": wanted})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in content.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.server.files |= {file["path"]: base64.b64decode(file["content"]) for file in files}
            self._answer(
                200, {"success": True, "commitUrl": f"{self.server.address}/me/tiny/commit/1", "commitOid": "1"}
            )
        else:  # whether the card is well formed
            self._answer(200, {"errors": [], "warnings": []})

    def _answer(self, code: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(text)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = make_project(tmp_path_factory.mktemp("push"))
    fit_in(project, "train.steps=2", "optim.warmup=0", "eval.every=null")
    return project


def push(project: Path, to: Path, target: Push) -> None:
    with chdir(project):
        export_run(load_run("runs/tiny", (), None).config, None, to, None, ExportFormat(), target)


@pytest.mark.parametrize("public", [False, True])
def test_all_files_are_uploaded(
    trained: Path, hub: Hub, tmp_path: Path, public: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    push(trained, tmp_path / "to", Push("me/tiny", public))
    assert [made.get("private", made.get("visibility") == "private") for made in hub.made] == [not public]
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()}
    assert {"model.safetensors", "config.json", "README.md", "tokenizer.json"} <= hub.files.keys()
    assert f"{hub.address}/me/tiny: uploaded" in capsys.readouterr().out


def test_the_folder_stays_where_the_hub_refuses_or_is_away(
    trained: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses = True
    with pytest.raises(UserError, match="me/tiny could not be uploaded") as refused:
        push(trained, tmp_path / "refused", Push("me/tiny"))
    assert "403" in refused.value.what
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="me/tiny could not be uploaded") as away:
        push(trained, tmp_path / "away", Push("me/tiny"))
    assert (refused.value.exit_code, away.value.exit_code) == (ExitCode.WRONG_REQUEST, ExitCode.FAILED)
    for error, name in ((refused.value, "refused"), (away.value, "away")):
        assert f"hf upload me/tiny {tmp_path / name}" in str(error.remedy)
        assert (tmp_path / name / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("me/tiny", "", "no token"),
        ("tiny", "t", "not a valid repository name"),
        ("me/ti ny", "t", "not a valid repository name"),
    ],
)
def test_what_cannot_be_uploaded_is_not_exported(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, token: str, says: str
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=says) as refused:
        push(trained, tmp_path / "to", Push(name))
    assert refused.value.exit_code is ExitCode.WRONG_REQUEST
    assert list(tmp_path.iterdir()) == []
