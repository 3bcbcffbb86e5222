"""Tokenizers: train a byte-level BPE on the training data, or load one from a folder or the Hugging Face Hub."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drawbar.errors import UserError, nearest
from drawbar.runtime.hub import fetching, hub_answers, meant_folder
from drawbar.runtime.log import logger
from drawbar.runtime.pretrained_files import Kind, read_tokenizer
from drawbar.util.file_content import content_of, pointer

END_OF_TEXT = "<|endoftext|>"
Wrapping = Literal["begin", "end", "begin_end", "none"]
"""Which special tokens a tokenizer puts around a text."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "chat_template.jinja"),
)
"""The usual files of a tokenizer's folder; those that a folder lacks, its tokenizer may not need."""
MODEL_INPUTS = ["input_ids", "attention_mask"]
"""What a tokenizer gives a model that knows no token types."""


def train_byte_bpe(
    texts: Iterable[str], vocab_size: int, more_special: dict[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016, over bytes as in GPT-2): no text is lost.

    The special token ``<|endoftext|>`` is begin and end token, and pads unless ``more_special`` says otherwise; what is
    put around a text is up to ``wrap_texts``. In a text, the same letters are ordinary text: no document can end
    itself. The vocabulary comes out smaller than asked where the texts have too few repeated pairs; that is logged.

    Args:
        texts: the training texts.
        vocab_size: number of tokens wanted, the 256 bytes and the special token included; at least 257.
        more_special: further special tokens by their role, such as ``{"mask_token": "<|mask|>"}``.
    """
    more_special = more_special or {}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, *more_special.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with ThreadPoolExecutor(max_workers=1) as thread:  # it may take minutes: the main thread handles signals
        thread.submit(backend.train_from_iterator, texts, trainer).result()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=MODEL_INPUTS,
        **{"pad_token": END_OF_TEXT, **more_special},
    )
    if len(tokenizer) < vocab_size:
        logger.warning(
            "the texts gave a vocabulary of %d tokens, fewer than the %d asked for", len(tokenizer), vocab_size
        )
    return tokenizer


def load_tokenizer(name_or_folder: str, kind: Kind = "tokenizer") -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder or, by name, from the Hugging Face Hub or its local cache.

    Without a network it answers within seconds, from the cache or with an error. Code that comes with a tokenizer is
    never run.

    Args:
        kind: what the name means in the user's settings, for the message.

    Raises:
        UserError: no such folder or name, the Hub cannot be reached and the name is not cached, or no usable tokenizer,
            or it needs a package that is not installed, or code of its own.
    """
    path = Path(name_or_folder)
    is_folder = path.is_dir()
    if path.is_file():
        remedy = f"give its folder, {path.parent}; tokenizer.save_pretrained(folder) writes one"
        raise UserError(f"{path} is a file, and a tokenizer is a folder", remedy=remedy)
    if is_folder and _has_pointers(path):
        raise _unusable(name_or_folder, is_folder, "")
    online = not is_folder and hub_answers(name_or_folder)
    try:
        with fetching(name_or_folder, online):
            tokenizer = read_tokenizer(name_or_folder, kind, local_files_only=not online)
    except UserError:
        raise
    except Exception as error:
        if is_folder or online:
            raise _unusable(name_or_folder, is_folder, str(error)) from error
        missing = f"{kind} {name_or_folder!r}"
        raise UserError(
            f"there is no {missing} on this machine, and the Hugging Face Hub cannot be reached",
            remedy=f"{meant_folder(name_or_folder)}give the folder of a {kind}, or fetch it where there is a network: "
            f"`hf download {name_or_folder}`, then bring the cache (HF_HOME) here",
        ) from error
    # transformers builds an empty tokenizer from just a model's config.json, silently
    if len(tokenizer) - len(set(tokenizer.all_special_ids)) < 2:
        files = " or ".join(getattr(tokenizer, "vocab_files_names", {}).values())
        reason = f"it has no vocabulary, which a {type(tokenizer).__name__} reads from {files or 'its files'}"
        raise _unusable(name_or_folder, is_folder, reason)
    return tokenizer


def begin_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """What a document begins with: the begin token, else the end token (as GPT-2 does), or nothing."""
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def begin_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """``begin_token_id`` as a list, which is empty if a document begins with no special token."""
    token = begin_token_id(tokenizer)
    return [] if token is None else [token]


def wrap_texts(tokenizer: PreTrainedTokenizerBase, wrapping: Wrapping) -> PreTrainedTokenizerBase:
    """Let the tokenizer itself put special tokens around each text.

    Two texts become ``begin A end B end``, and without end tokens ``begin A begin B``, of one token type.

    Raises:
        UserError: the tokenizer is written in Python, and is not one of the tokenizers library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _inherent_special_tokens(tokenizer)
    before = [begin_token_id(tokenizer)] if wrapping in ("begin", "begin_end") else []
    after = [tokenizer.eos_token_id] if wrapping in ("end", "begin_end") else []
    special = {token: tokenizer.convert_ids_to_tokens(token) for token in (*before, *after) if token is not None}
    first, last = ([special[token] for token in tokens if token in special] for tokens in (before, after))
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *(last or first), "$B", *last],
        special_tokens=[(name, token) for token, name in special.items()],
    )
    set_option(tokenizer, "model_input_names", MODEL_INPUTS)
    return tokenizer


def check_wrapping_is_saved(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a wrapped tokenizer still wraps texts when it is loaded from a folder.

    Raises:
        UserError: its class brings its own special tokens whenever it is loaded (as BERT's does).
    """
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        loaded = load_tokenizer(folder)
    if special_tokens_around(loaded) != special_tokens_around(tokenizer):
        raise _inherent_special_tokens(tokenizer)


def set_option(tokenizer: PreTrainedTokenizerBase, name: str, value: Any) -> None:
    """Set an attribute of a tokenizer and its entry in ``init_kwargs``, which ``save_pretrained`` saves."""
    setattr(tokenizer, name, value)
    tokenizer.init_kwargs[name] = value


def special_tokens_around(
    tokenizer: PreTrainedTokenizerBase, kind: Literal["text", "text_target"] = "text"
) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer itself puts before and after a text, or a target (not always the same)."""
    wrapped, plain = (
        list(tokenizer(**{kind: "a"}, add_special_tokens=special)["input_ids"]) for special in (True, False)
    )
    start = next(at for at in range(len(wrapped) + 1) if wrapped[at : at + len(plain)] == plain)
    return wrapped[:start], wrapped[start + len(plain) :]


def encode_to_limit(
    tokenizer: PreTrainedTokenizerBase, limit: int, setting: str, *texts: Any, **options: Any
) -> tuple[BatchEncoding, bool]:
    """Encode a text, or two, with the special tokens that the tokenizer itself puts around them; also return whether
    they were truncated.

    Special tokens stay, and of two texts the longer one is truncated first.

    Args:
        limit: most tokens.
        setting: the setting that says so.
        options: of the tokenizer's call.

    Raises:
        UserError: the special tokens leave no room.
    """
    options |= {"return_attention_mask": False, "verbose": False}
    encoded = tokenizer(*texts, **options)
    if len(encoded["input_ids"]) <= limit:
        return encoded, False
    special = tokenizer.num_special_tokens_to_add(len(texts) > 1)
    if limit <= special:
        raise UserError(
            f"the special tokens alone take {special} of {limit} tokens",
            where=setting,
            remedy=f"set {setting}={special + 1} or more",
        )
    return tokenizer(*texts, truncation=True, max_length=limit, **options), True


def prefix_space(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Let a byte-level tokenizer write a space before a text's first word, too: a word is then the same everywhere, and
    a list of words the same as their text. Any other tokenizer stays as it is."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str())["pre_tokenizer"] if backend is not None else None
    if state and state["type"] == "ByteLevel":  # not one in a Sequence: it would put a space before every part
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=state.get("use_regex", True))
        without_space = processors.ByteLevel(trim_offsets=True, add_prefix_space=True)  # offsets without that space
        present = backend.post_processor
        backend.post_processor = processors.Sequence([present, without_space]) if present else without_space
        set_option(tokenizer, "add_prefix_space", True)
    return tokenizer


def set_languages(tokenizer: PreTrainedTokenizerBase, source: str | None, target: str | None) -> None:
    """Tell the tokenizer of a multilingual model (NLLB, mBART, M2M100) from which language to which it translates: it
    marks sources and targets with their languages.

    Raises:
        UserError: the languages are needed but not given; it does not know them; or it marks none.
    """
    where = "task.source_language, task.target_language"
    if not hasattr(tokenizer, "set_src_lang_special_tokens"):
        if source is not None or target is not None:
            raise UserError(
                f"a {type(tokenizer).__name__} does not mark texts with their languages",
                where=where,
                remedy="set both to null; some models want the language in task.source_prefix",
            )
        return
    known = sorted(getattr(tokenizer, "lang_code_to_id", None) or map(str, tokenizer.extra_special_tokens))
    remedy = f"set both, to two of: {', '.join(known)}"
    if source is None or target is None:
        what = f"a {type(tokenizer).__name__} marks texts with their languages, and does not know which they are"
        raise UserError(what, where=where, remedy=remedy)
    for setting, language in (("task.source_language", source), ("task.target_language", target)):
        if language not in known:
            guess = nearest(language, known)
            hint = f"; did you mean {guess}?" if guess else ""
            raise UserError(f"a {type(tokenizer).__name__} has no {language!r}{hint}", where=setting, remedy=remedy)
    set_option(tokenizer, "src_lang", source)
    set_option(tokenizer, "tgt_lang", target)


def _inherent_special_tokens(tokenizer: PreTrainedTokenizerBase) -> UserError:
    return UserError(
        f"a {type(tokenizer).__name__} has its own special tokens around a text, and takes no others",
        where="task.add_special_tokens",
        remedy="leave task.add_special_tokens=auto, or name another tokenizer in task.tokenizer",
    )


def _unusable(name: str, is_folder: bool, reason: str) -> UserError:
    broken = _broken_file(Path(name)) if is_folder else None
    if broken is not None:
        file, fault, remedy = broken
        return UserError(
            f"the folder {name} holds no tokenizer that can be loaded: {file.name} {fault}",
            where=str(file),
            remedy=remedy
            or "copy the file again from where the tokenizer comes from, or save the tokenizer again: "
            "tokenizer.save_pretrained(folder) writes tokenizer.json and tokenizer_config.json",
        )
    place = f"the folder {name}" if is_folder else f"{name!r} on the Hugging Face Hub"
    why = (reason.strip().splitlines() or [""])[0].strip()
    if why.endswith(":") or not why:  # a list of the files that would do
        why = "it has none of a tokenizer's files"
    return UserError(
        f"{place} holds no tokenizer that can be loaded: {why}",
        remedy="tokenizer.json and tokenizer_config.json are what tokenizer.save_pretrained(folder) writes",
    )


def _broken_file(folder: Path) -> tuple[Path, str, str | None] | None:
    """A file of the folder that no tokenizer can be loaded from, why, and the remedy if it is known; None if the
    files look whole."""
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for file in present:
        with suppress(OSError):
            found = content_of(file)
            if found is not None:
                return file, f"is {found.what}", found.remedy_for(file)
        fault = _fault_of_file(file)
        if fault is not None:
            return file, fault, None
    if {file.name for file in present} & {"vocab.json", "merges.txt", "tokenizer.json"} == {"vocab.json"}:
        return folder / "merges.txt", "is missing, which belongs to vocab.json", None
    return None


def _has_pointers(folder: Path) -> bool:
    """Whether a file of the folder is a placeholder for one that was not fetched: a vocabulary of lines is read from
    it, too."""
    with suppress(OSError):
        return any(pointer(folder / name) is not None for name in TOKENIZER_FILES)
    return False


def _fault_of_file(file: Path) -> str | None:
    try:
        content = file.read_bytes()
        if not content.strip():
            return "is empty"
        if file.suffix not in (".json", ".txt"):
            return None
        values = json.loads(content) if file.suffix == ".json" else content.decode("utf-8")
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except ValueError as error:
        return f"is not valid JSON: {error}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if file.suffix == ".json" and not isinstance(values, dict):
        return "holds no JSON object"
    return "describes no model" if file.name == "tokenizer.json" and "model" not in values else None
