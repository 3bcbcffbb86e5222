"""How a model is computed and spread: number formats and data parallelism."""
