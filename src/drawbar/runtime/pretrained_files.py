"""The only callers of transformers' ``from_pretrained`` and ``from_config``, for models, configs and tokenizers.

Code that comes with a model is never run, and the user is never asked to allow it; if a model needs something that this
machine or drawbar lacks, the error says so.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers import dynamic_module_utils as code_of_models

from drawbar.errors import UserError
from drawbar.runtime.log import logger

Kind = Literal["model", "tokenizer"]
"""What is loaded; also the setting of a task that names it."""

_QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""Fields of a ``config.json`` for quantized weights: of transformers, of older models, of MLX."""
_OWN_CODE = re.compile(r"trust_remote_code|custom code")
_NEEDED = (
    r"pip[3]?\s+install\s+(?:-\S+\s+)*['\"]?([A-Za-z][\w.\-]*)",
    r"need to install ([a-z][\w\-]*)",
    r"requires the (?:🤗 )?([\w\-]+) library",
)
"""How transformers and the libraries that it uses report a missing package."""

# a user's task may also load a model: transformers would ask there on standard input, and wait
code_of_models.TIME_OUT_REMOTE_CODE = 0


def read_config(name: str, *, for_weights: bool = True, **options: Any) -> PreTrainedConfig:
    """The config of a model, from its folder or the Hub.

    Args:
        name: a folder, or a name on the Hub.
        for_weights: whether the weights will be loaded, too; else the config is for building another model.
        options: for transformers, such as ``local_files_only``.

    Raises:
        UserError: the model needs its own code or a package that is not installed, or its weights are quantized.
    """
    with _explained("model", name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    for field in _QUANTIZED:
        if not (found := getattr(config, field, None)):
            continue
        if for_weights:
            raise _quantized(name, found)
        delattr(config, field)
    kernel = config._attn_implementation
    if isinstance(kernel, str) and "/" in kernel:
        logger.warning("%s asks for a kernel from the Hub, %s: it gets the default attention instead", name, kernel)
        config._attn_implementation = None
    return config


def read_model(model_class: Any, name: str, **options: Any) -> Any:
    """What ``from_pretrained`` of an ``AutoModelFor…`` class returns. Raises UserError as :func:`read_config` does."""
    with _explained("model", name):
        return model_class.from_pretrained(name, trust_remote_code=False, **options)


def make_model(model_class: Any, config: PreTrainedConfig, **options: Any) -> Any:
    """A model of an ``AutoModelFor…`` class with random weights. Raises UserError as :func:`read_config` does."""
    with _explained("model", config.name_or_path or config.model_type):
        return model_class.from_config(config, trust_remote_code=False, **options)


def read_generation_config(name: str, **options: Any) -> GenerationConfig:
    """Read the generation config as ``from_pretrained`` of a model would."""
    try:
        return GenerationConfig.from_pretrained(name, **options)
    except OSError:  # older models have it in their config
        return GenerationConfig.from_pretrained(
            name, config_file_name="config.json", _from_model_config=True, **options
        )


def read_tokenizer(name: str, kind: Kind = "tokenizer", **options: Any) -> PreTrainedTokenizerBase:
    """A tokenizer, from its folder or the Hub; ``kind`` is the setting in which the user named it.

    Raises:
        UserError: it needs its own code or a package that is not installed.
    """
    with _explained(kind, name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)


@contextmanager
def _explained(kind: Kind, name: str) -> Iterator[None]:
    """Context that explains what is missing here; the caller explains what is wrong with the model itself."""
    try:
        yield
    except (ImportError, ValueError) as error:
        text = " ".join(str(error).split())
        if not isinstance(error, ImportError) and _OWN_CODE.search(text):
            native = "name one whose code is part of transformers" if kind == "model" else "name another tokenizer"
            raise UserError(
                f"the {kind} {name} needs its own Python code, which drawbar does not run",
                where=f"task.{kind}",
                remedy=f"{native}; code that you have read and trust can go into a task of your own (docs/tasks.md)",
            ) from error
        packages = [found[1].rstrip(".").lower() for way in _NEEDED if (found := re.search(way, text))]
        if isinstance(error, ModuleNotFoundError) and error.name and not packages:
            packages = [error.name.partition(".")[0]]
        if packages == ["tiktoken"] and find_spec("sentencepiece") is None:  # which it silently tries first
            packages, text = ["sentencepiece"], "its vocabulary is a file of that library"
        if not isinstance(error, ImportError) and not packages:
            raise
        package = packages[0] if packages else None
        raise UserError(
            f"the {kind} {name} needs {f'the package {package}' if package else 'something not installed'}: {text}",
            where=f"task.{kind}",
            remedy=f"`pip install {package}`" if package else "install it alongside drawbar",
        ) from error


def _quantized(name: str, found: Any) -> UserError:
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    bits = found.get("bits") if isinstance(found, dict) else None
    how = getattr(method, "value", method) or (f"{bits} bits" if bits else None)
    return UserError(
        f"{Path(name).name if Path(name).is_dir() else name} is stored quantized{f' ({how})' if how else ''}, which "
        "drawbar does not train",
        where="task.model",
        remedy="name the unquantized model that it was made from; lora.base=nf4 stores that in 4 bits",
    )
