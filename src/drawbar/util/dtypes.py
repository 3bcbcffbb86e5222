"""``DTYPES``: torch dtypes by the names that settings use."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
