"""``ModelParallelPlan``: how a model's modules are sharded or split, so that strategies are independent of the
architecture."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Style = Literal[
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "fused_colwise",
    "embedding",
    "head_bias",
    "vocabulary",
    "replicated",
]
"""How a module is sharded over the tensor-parallel ranks.

=========================  ========================================================================================
``colwise``                a linear layer's outputs; the next layer takes them sharded
``rowwise``                a linear layer's inputs; its outputs are summed over the ranks
``colwise_gather_output``  a linear layer's outputs, which are then gathered
``rowwise_split_input``    a linear layer's inputs, which are replicated, and sharded before the layer
``fused_colwise``          the outputs of several layers that are stored as one (queries, keys and values)
``embedding``              the rows of an embedding: its vocabulary
``head_bias``              the columns of an embedding that holds one number for each attention head (T5)
``vocabulary``             the outputs of the layer that scores the vocabulary
``replicated``             nothing, but its input differs between ranks, so gradients are summed
=========================  ========================================================================================
"""


@dataclass(frozen=True)
class PipelinePlan:
    """Where a model can be split into stages, by module names."""

    blocks: str
    """The ``ModuleList`` of repeated blocks."""
    embedding: str
    """The token embedding; in later stages, hidden states from the previous stage replace it."""
    before: tuple[str, ...] = ()
    """Other modules before the blocks (positions, dropout); only in the first stage."""
    after: tuple[str, ...] = ()
    """Modules between the blocks and the head; only in the last stage."""
    head: str = "lm_head"
    """The module that scores the vocabulary; only in the last stage."""


@dataclass(frozen=True)
class ModelParallelPlan:
    """How a model's modules map to mesh axes."""

    tensor: Mapping[str, Style] | None = None
    """Module names, with ``*`` for the number of a block, and their styles; None if tensor parallelism is not
    supported."""
    tensor_refusal: str = ""
    """Why tensor parallelism is not supported, for the error."""
    fused: Mapping[str, int] = field(default_factory=dict)
    """Number of linear layers fused in each ``fused_colwise`` module, by module name with ``*``."""
    divisible_sizes: Mapping[str, int] = field(default_factory=dict)
    """Numbers that the tensor-parallel degree must divide, by name (``num_key_value_heads``: 2)."""
    divided_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module names, with ``*``, and their attributes to divide by the degree (GPT-2's ``split_size``)."""
    sequence_blocks: str | None = None
    """The ``ModuleList`` of repeated blocks, or None. With ``parallel.sequence``, activations in them are sharded along
    the sequence, outside attention and feed-forward. Without it, the gradient of the input of each attention and
    feed-forward is all-reduced once, instead of once per linear layer, if all of its linear layers have a style."""
    sequence_refusal: str = ""
    """Why ``parallel.sequence`` is not supported if ``sequence_blocks`` is None, for the error."""
    pipeline: PipelinePlan | None = None
    """None if the model cannot be split into stages."""
    pipeline_refusal: str = ""
    """Why it cannot be split, for the error."""
