"""The task of ``memory_of_data.py``: a tiny language model whose tokens are words, so that encoding is quick."""

import numpy as np

import drawbar
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.tasks.causal_lm import CausalLM

VOCABULARY = 5000
"""Words: ``w0000`` to ``w4999``."""


class Words(CausalLM):
    def build_tokenizer(self):
        return train_byte_bpe([], 257)  # for what it says of padding: the words are numbers already

    def encode(self, record, train):
        tokens = np.array([int(word[1:]) for word in record["text"].split()], np.int32)
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    drawbar.main(Words)
