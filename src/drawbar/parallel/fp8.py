"""Linear layers that multiply in fp8 during training (arXiv:2209.05433), with torchao."""

from dataclasses import replace
from functools import wraps

import torch
from torch import Tensor, nn

from drawbar.errors import UserError
from drawbar.parallel.blocks import blocks_for

SETTING = "parallel.fp8"
LEAST_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""Minimum compute capability of NVIDIA GPUs, by recipe: one scale per matrix, or one per row."""
MULTIPLE = 16
"""Matrix sizes must be multiples of this for the kernels."""


def check_fp8(recipe: str, device: torch.device) -> None:
    """Check, before the model is built, whether a CUDA device supports the recipe.

    Raises:
        UserError: the GPU does not support fp8 matrix products, or torchao is not installed.
    """
    has, least = torch.cuda.get_device_capability(device), LEAST_CAPABILITY[recipe]
    if torch.version.hip or has < least:
        raise UserError(
            f"fp8 with {recipe} scales needs an NVIDIA GPU with compute capability {least[0]}.{least[1]} or higher, "
            f"and {torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}",
            where=SETTING,
            remedy=f"set {SETTING}=null; tensorwise needs 8.9, and rowwise 9.0",
        )
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"torchao cannot be used: {error}",
            where=SETTING,
            remedy=f"install it (pip install 'drawbar[fp8]'), or set {SETTING}=null",
        ) from error


def compute_in_fp8(model: nn.Module, recipe: str) -> None:
    """Make trained linear layers inside the repeated blocks multiply in fp8, in place, if both sizes of the weight are
    multiples of ``MULTIPLE``; other layers are unchanged, as are parameters, their names and dtypes, and evaluation.
    Call before the model is parallelized.

    Raises:
        UserError: the model has no such layers.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # takes seconds to import

    inside = {module for block in blocks_for(model, SETTING) for module in block.modules()}

    def fits(module: nn.Module, _: str) -> bool:
        if type(module) is not nn.Linear or module not in inside or not module.weight.requires_grad:
            return False
        return not any(size % MULTIPLE for size in module.weight.shape)

    if not any(fits(module, "") for module in inside):
        raise UserError(
            f"{type(model).__name__} has no trained linear layer in its blocks whose sizes are multiples of {MULTIPLE}",
            where=SETTING,
            remedy=f"set {SETTING}=null",
        )
    # a micro-batch has any number of tokens, and the weight's gradient is a product over them: torchao pads the tokens
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=fits, config=config)
    _refine(model)


def _refine(model: nn.Module) -> None:
    """Give torchao's layers a forward that evaluates in bf16, and rounds weights identically under all strategies."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    class Fp8WhileTraining(Float8Linear):
        @wraps(nn.Linear.forward)  # ``parameters_cast_by_autocast`` unwraps this to find nn.Linear's forward
        def forward(self, input: Tensor) -> Tensor:
            if not self.training:
                return nn.Linear.forward(self, input)
            # to bf16 first, as FSDP gathers the weight; under other strategies, torchao would take the weight in fp32
            operands = input.bfloat16(), self.weight.bfloat16().t()
            output: Tensor = matmul_with_hp_or_float8_args.apply(*operands, self.linear_mm_config, self.config)
            return output if self.bias is None else output + self.bias.bfloat16()

    for module in model.modules():
        if type(module) is Float8Linear:
            module.__class__ = Fp8WhileTraining
