"""Sources, tokenizers, encoded samples, packing, and the order in which training visits them."""
