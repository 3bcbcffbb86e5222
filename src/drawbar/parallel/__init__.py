"""How a model is trained on many processes: data, sharded, tensor, context and pipeline parallelism; dtypes."""
