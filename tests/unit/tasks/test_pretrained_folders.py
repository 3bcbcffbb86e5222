"""A pretrained model's folder that is none: what is said of it, before its tokenizer is missed."""

from pathlib import Path

import pytest

from drawbar.config.io.load_config import load_config
from drawbar.errors import UserError
from drawbar.models.huggingface import load_pretrained
from drawbar.tasks.task_registry import task_class


@pytest.mark.parametrize("task_type", ["causal_lm", "masked_lm", "sequence_classification"])
@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "the folder {folder} is empty"),
        ({"notes.txt": "mine"}, "the folder {folder} has no config.json"),
        ({"config.json": ""}, "{folder}/config.json is not JSON, line 1: Expecting value"),
        ({"config.json": '{"model_type": "gpt2",\n "n'}, "{folder}/config.json is not JSON, line 2: "),
        ({"config.json": "[]"}, "{folder}/config.json is not a JSON object, but a list"),
    ],
)
def test_folder_without_a_model(tmp_path: Path, task_type: str, files: dict[str, str], says: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    config = load_config(None, [f"task.type={task_type}", f"task.model={tmp_path}"]).config
    for use in (task_class(task_type)(config).build_tokenizer, lambda: load_pretrained(str(tmp_path))):
        with pytest.raises(UserError) as caught:
            use()
        assert says.format(folder=tmp_path) in caught.value.what
        assert caught.value.where == "task.model"
        assert caught.value.remedy


@pytest.mark.parametrize("name", ["", "checkpoints/step-00000006"])
def test_a_run_is_no_folder_of_a_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints" / "step-00000006").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("run: {name: a}\n")
    with pytest.raises(UserError, match=r"a run, and not a folder of a model|a checkpoint of a run") as caught:
        load_pretrained(str(tmp_path / name))
    assert f"drawbar export {tmp_path} --to" in str(caught.value.remedy)


def test_a_config_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{\xff}")
    with pytest.raises(UserError, match=r"config.json is not JSON: "):
        load_pretrained(str(tmp_path))
