"""Floating-point operations that a model needs for a token, and the most that a device can do: for the MFU."""

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_PEAKS = {
    "B200": 2250,
    "MI300X": 1307,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "GH200": 989,
    "H200": 989,
    "L40S": 362,
    "A100": 312,
    "MI250X": 191.5,
    "A30": 165,
    "RTX 4090": 165,
    "RTX A6000": 155,
    "A40": 150,
    "V100": 125,
    "A10G": 70,
    "A10": 125,
    "L40": 181,
    "L4": 121,
    "RTX 3090": 71,
    "T4": 65,
}
"""TFLOP/s of a device in 16 bits without sparsity, from the vendors' data sheets; a name that contains another
name (H100 PCIe contains H100) comes before it. A device of MI250X is half of the card."""


def training_flops_per_token(model: nn.Module, attended: float) -> float | None:
    """Operations of forward and backward for one token, without what is computed again (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B): 6 for each weight of a linear layer, 4 where it is frozen, and for each layer
    12 x hidden size x ``attended``.

    Args:
        model: whole; it may be on the meta device.
        attended: tokens that a token attends to on average; a causal mask does not lower it, as in the paper.

    Returns:
        None if that formula does not count the model: encoder-decoders, experts, and models that are not
        transformers.
    """
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return None
    text = model.config.get_text_config()
    layers, hidden = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
    if layers is None or hidden is None or any(parameter.ndim > 2 for parameter in model.parameters()):
        return None
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    of_weights = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights)
    return float(of_weights + 12 * layers * hidden * attended)


def peak_flops(device_name: str) -> float | None:
    """Operations a second of a device in bf16 or fp16, by its name (``torch.cuda.get_device_name()``); None for one
    that is not known. Upper and lower case are the same: users write names, too."""
    found = (peak for name, peak in _PEAKS.items() if re.search(rf"\b{name}\b", device_name, re.IGNORECASE))
    return next((1e12 * peak for peak in found), None)
