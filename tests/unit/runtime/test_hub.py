"""What is said of a model that is neither a folder nor on the Hub: often a folder there is meant."""

from pathlib import Path

import pytest
from huggingface_hub.utils import validate_repo_id

from drawbar.config.schema.run_config import RunConfig
from drawbar.data.tokenizer import load_tokenizer
from drawbar.errors import UserError
from drawbar.models.huggingface import load_model_config
from drawbar.runtime import hub
from drawbar.runtime.hub import meant_folder
from drawbar.tasks.causal_lm import CausalLM


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which there are folders, on a machine without a network."""

    def no_network(_: object, name: str, **__: object) -> None:
        validate_repo_id(name)
        raise ConnectionError

    (tmp_path / "models" / "tiny-llama").mkdir(parents=True)
    (tmp_path / "tiny-llama").mkdir()
    (tmp_path / "tiny-lamas.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub.HfApi, "repo_info", no_network)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tiny-lama", "./tiny-llama"),
        ("./tiny-lama", "./tiny-llama"),
        ("models/tiny_llama", "./models/tiny-llama"),
        ("gpt2", None),
        ("team/tiny-lama", None),
    ],
)
@pytest.mark.usefixtures("beside")
def test_a_folder_of_nearly_that_name(name: str, meant: str | None) -> None:
    assert meant_folder(name) == (f"did you mean {meant}? Else " if meant else "")


def test_a_folder_of_nearly_that_path(beside: Path) -> None:
    assert meant_folder(str(beside / "tiny-lama")) == f"did you mean {beside / 'tiny-llama'}? Else "


@pytest.mark.parametrize("name", ["tiny-lama", "./tiny-lama"])
@pytest.mark.usefixtures("beside")
def test_a_model_without_a_folder(name: str) -> None:
    with pytest.raises(UserError, match=name) as of_config:
        load_model_config(name, None, None)
    task = CausalLM(RunConfig(task=CausalLM.Config(model=name)))
    with pytest.raises(UserError, match=name) as of_task:
        task.build_tokenizer()
    assert "tokenizer" not in str(of_task.value)
    for error in (of_config.value, of_task.value):
        assert "did you mean ./tiny-llama? Else " in str(error.remedy)


@pytest.mark.usefixtures("beside")
def test_a_tokenizer_without_a_folder() -> None:
    with pytest.raises(UserError, match=r"no tokenizer 'tiny-lama' on this machine[\s\S]*did you mean \./tiny-llama\?"):
        load_tokenizer("tiny-lama")
