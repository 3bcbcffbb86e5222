"""Code that comes with a model or a tokenizer: never run, and nobody is asked. What is missing here is told as such."""

import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from drawbar.data.tokenizer import load_tokenizer, train_byte_bpe
from drawbar.errors import UserError
from drawbar.models.huggingface import build_from_scratch, load_model_config, load_pretrained
from drawbar.models.stored import build_meta_model

TINY = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and its tokenizer, with code that leaves a file behind when it is run; standard input says yes."""
    tokenizer = train_byte_bpe([], 257)
    tokenizer.save_pretrained(tmp_path / "m")
    build_from_scratch("gpt2", TINY, tokenizer).save_pretrained(tmp_path / "m")
    for name in ("own.py", "custom_generate/generate.py"):
        (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_text(f"open({str(tmp_path / 'RUN')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    return tmp_path / "m"


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def uses(folder: Path) -> dict[str, Any]:
    name = str(folder)
    return {
        "config": lambda: load_model_config(name, None, None),
        "weights": lambda: load_pretrained(name),
        "structure": lambda: build_meta_model(name),
        "from scratch": lambda: build_from_scratch(name, {}, train_byte_bpe([], 257)),
        "tokenizer": lambda: load_tokenizer(name, "model"),
    }


OWN = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}


@pytest.mark.parametrize("auto_map", [OWN, {"AutoConfig": "somebody/else--own.Own"}])
def test_a_model_that_needs_its_own_code_is_refused(folder: Path, auto_map: dict[str, Any]) -> None:
    change(folder / "config.json", auto_map=auto_map, model_type="mine", architectures=["Mine"])
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": OWN["AutoTokenizer"]}, tokenizer_class="Own")
    for use in uses(folder).values():
        with pytest.raises(UserError, match=f"the model {folder} needs its own Python code, which drawbar") as caught:
            use()
        assert caught.value.where == "task.model"
        assert caught.value.remedy
    assert not (folder.parent / "RUN").exists()


def test_a_tokenizer_that_needs_its_own_code_is_refused(folder: Path) -> None:
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"the tokenizer .* needs its own Python code") as caught:
        load_tokenizer(str(folder))
    assert caught.value.where == "task.tokenizer"
    assert not (folder.parent / "RUN").exists()


def test_code_beside_a_model_of_transformers_is_left_alone(folder: Path) -> None:
    change(folder / "config.json", auto_map=OWN)
    for use in uses(folder).values():
        use()
    assert not (folder.parent / "RUN").exists()


def test_a_kernel_that_a_config_names_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(folder / "config.json", attn_implementation="kernels-community/flash-attn2")
    assert load_pretrained(str(folder)).config._attn_implementation == "sdpa"
    assert "asks for a kernel from the Hub, kernels-community/flash-attn2: it gets the default attention" in caplog.text


def test_a_users_own_loading_is_not_asked_either(folder: Path) -> None:
    change(folder / "config.json", auto_map=OWN, model_type="mine")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not (folder.parent / "RUN").exists()


@pytest.mark.parametrize(
    ("fields", "how"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "(bitsandbytes), "),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "(gptq), "),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "(awq), "),
        ({"quantization_config": {"quant_method": "fp8"}}, "(fp8), "),
        ({"quantization_config": {"load_in_8bit": True}}, ", "),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "(compressed-tensors), "),
        ({"quantization": {"group_size": 64, "bits": 4}}, "(4 bits), "),
    ],
)
def test_a_quantized_model_is_refused(folder: Path, fields: dict[str, Any], how: str) -> None:
    change(folder / "config.json", **fields)
    by_name = uses(folder)
    for use in ("config", "weights", "structure"):
        with pytest.raises(UserError) as caught:
            by_name[use]()
        assert caught.value.what.startswith("m is stored quantized")
        assert f"{how}which drawbar does not train" in caught.value.what
        assert caught.value.where == "task.model"
    model = by_name["from scratch"]()
    assert not any(hasattr(model.config, field) for field in fields), "an export would be taken for quantized"
    by_name["tokenizer"]()


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (
            ImportError("\nT5Tokenizer requires the SentencePiece library but it was not found in your environment."),
            "sentencepiece",
        ),
        (ImportError("You need to install fugashi to use MecabTokenizer. See https://pypi.org/"), "fugashi"),
        (ModuleNotFoundError("No module named 'mamba_ssm.ops'", name="mamba_ssm.ops"), "mamba_ssm"),
        (ImportError("\nX requires the timm library. You can install it with pip:\n`pip install timm`."), "timm"),
        (ImportError("Using `gptq` requires: `pip install -U gptqmodel>=1`"), "gptqmodel"),
        (ValueError("`blobfile` is required to read it. Install it with `pip install blobfile`."), "blobfile"),
    ],
)
def test_a_package_that_is_missing_is_named(
    folder: Path, error: Exception, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", missing)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", missing)
    for use in ("tokenizer", "weights"):
        with pytest.raises(UserError, match=f"the model {folder} needs the package {package}: ") as caught:
            uses(folder)[use]()
        assert (caught.value.where, caught.value.remedy) == ("task.model", f"`pip install {package}`")
        assert "\n" not in caught.value.what


@pytest.mark.parametrize(
    ("package", "model_type", "file", "settings"),
    [
        ("sentencepiece", "t5", "spiece.model", {}),
        ("sentencepiece", "llama", "tokenizer.model", {}),
        (
            "sudachipy",
            "bert",
            "vocab.txt",
            {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "sudachi"},
        ),
    ],
)
def test_a_package_that_is_really_missing(
    tmp_path: Path, package: str, model_type: str, file: str, settings: dict[str, str]
) -> None:
    if find_spec(package):
        pytest.skip("it is installed here")
    (tmp_path / file).write_bytes(b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UserError, match=rf"the tokenizer {tmp_path} needs the package {package}: "):
        load_tokenizer(str(tmp_path))


def test_values_that_are_wrong_are_no_missing_package(folder: Path) -> None:
    change(folder / "config.json", n_head=3)
    with pytest.raises(UserError) as caught:
        load_pretrained(str(folder))
    assert "needs" not in caught.value.what
