"""Tokenizers: train a byte-level BPE on the training data, or load one from a folder or the Hugging Face Hub."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drawbar.errors import UserError
from drawbar.runtime.hub import hub_answers
from drawbar.runtime.log import logger

END_OF_TEXT = "<|endoftext|>"


def train_byte_bpe(
    texts: Iterable[str], vocab_size: int, more_special: dict[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016, over bytes as in GPT-2): no text is lost.

    The special token ``<|endoftext|>`` begins and ends a document, and pads unless ``more_special`` says otherwise. In
    a text, the same letters are ordinary text: no document can end itself. The vocabulary comes out smaller than asked
    where the texts have too few repeated pairs; that is logged.

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
    with ThreadPoolExecutor(max_workers=1) as thread:  # it may take minutes, in which the main thread hears signals
        thread.submit(backend.train_from_iterator, texts, trainer).result()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **{"pad_token": END_OF_TEXT, **more_special},
    )
    if len(tokenizer) < vocab_size:
        logger.warning(
            "the texts gave a vocabulary of %d tokens, fewer than the %d asked for", len(tokenizer), vocab_size
        )
    return tokenizer


def load_tokenizer(name_or_folder: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder or, by name, from the Hugging Face Hub or its local cache.

    Without a network it answers within seconds, from the cache or with an error. Code that comes with a tokenizer is
    never run.

    Raises:
        UserError: no such folder or name, the Hub cannot be reached and the name is not cached, or no usable tokenizer.
    """
    is_folder = Path(name_or_folder).is_dir()
    online = not is_folder and hub_answers(name_or_folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_folder, local_files_only=not online, trust_remote_code=False)
    except Exception as error:
        if is_folder or online:
            raise _unusable(name_or_folder, is_folder, str(error)) from error
        raise UserError(
            f"there is no tokenizer {name_or_folder!r} on this machine, and the Hugging Face Hub cannot be reached",
            remedy="give the folder of a tokenizer, or fetch it where there is a network: "
            f"`hf download {name_or_folder}`, then bring the cache (HF_HOME) here",
        ) from error
    # transformers builds an empty tokenizer from a model's config.json alone, without a word
    if len(tokenizer) - len(set(tokenizer.all_special_ids)) < 2:
        raise _unusable(name_or_folder, is_folder, "it has no vocabulary")
    return tokenizer


def begin_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """What a document begins with: the begin token, else the end token (as GPT-2 does), or nothing."""
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def framed(tokenizer: PreTrainedTokenizerBase, text: str, pair: str | None = None) -> dict[str, list[int]]:
    """A text, or two, as an encoder reads them: with the special tokens that the tokenizer puts around them.

    A tokenizer that puts none (such as ``train_byte_bpe`` makes) gets its begin and end tokens.

    Returns:
        ``input_ids`` and, for tokenizers that have them, ``token_type_ids``; not cut.
    """
    if tokenizer.num_special_tokens_to_add(pair is not None):
        encoded = tokenizer(text, pair, return_attention_mask=False, verbose=False)
        return {name: list(encoded[name]) for name in encoded}
    texts = [text] if pair is None else [text, pair]
    pieces = [tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"] for piece in texts]
    begin, end = begin_token(tokenizer), tokenizer.eos_token_id
    tokens = [begin, *(token for piece in pieces for token in (*piece, end))]
    return {"input_ids": [token for token in tokens if token is not None]}


def _unusable(name: str, is_folder: bool, reason: str) -> UserError:
    place = f"the folder {name}" if is_folder else f"{name!r} on the Hugging Face Hub"
    return UserError(
        f"{place} holds no tokenizer that can be loaded: {reason.strip().splitlines()[0]}",
        remedy="tokenizer.json and tokenizer_config.json are what tokenizer.save_pretrained(folder) writes",
    )
