"""Context parallelism: each sequence is sharded over several ranks, which compute ring attention.

Uses torch's ``context_parallel`` (Ring Attention, Liu et al. 2023, arXiv:2310.01889): each rank has the queries of its
own tokens, and receives the keys and values of the others. In a causal model the last tokens attend to all others and
the first to none, so for balance each rank gets a piece from the head of the sequence and its counterpart from the
tail.

B: rows, L: tokens in a row, P: tokens of this rank, V: vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from drawbar.errors import UserError

DEVICES = {"cuda": 32}
"""Device types for which torch has ring attention, with the number that must divide the tokens of a chunk: the fp32
kernel pads its log-sum-exps to a multiple of 32, and the ring would treat the padding as tokens."""
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""The kernels that ring attention uses here. torch also supports cuDNN, which drawbar does not test; the math kernel
would attend only to this rank's tokens."""
RING = "drawbar_ring"
"""The name under which :func:`_attend` is registered in transformers, which has no mask of that name and so builds
none."""
FIELDS = {"input_ids", "labels", "attention_mask"}
FAMILIES = {"gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "phi", "phi3", "qwen2"}
FAMILIES |= {"qwen3", "smollm3", "starcoder2"}
"""Causal decoders that accept positions as inputs. Only families whose gradients are tested against one process are
listed: others may silently compute wrong results, such as a layer that carries a state along the sequence."""


def check_context(device: torch.device, label_placement: str | None) -> None:
    """Refuse, before the model is built, a device or a task that context parallelism does not support.

    Args:
        label_placement: ``task.label_placement``; only ``next_token`` is accepted.
    """
    if device.type not in DEVICES:
        raise UserError(
            f"torch has no context parallelism for {device.type} devices, only for {', '.join(sorted(DEVICES))}",
            where="parallel.context",
            remedy="set parallel.context=1, or run on CUDA devices",
        )
    if label_placement != "next_token":
        raise UserError(
            "only tasks that predict the next token can cut a sequence over ranks",
            where="parallel.context",
            remedy="set parallel.context=1",
        )


class ContextParallel:
    """Shards batches along the sequence, and makes a model compute ring attention on them.

    Args:
        model: a causal decoder of transformers, with sdpa attention over all previous tokens.
        mesh: the ranks that share a sequence: only ``cp``.
        ignored: the label of tokens that are not targets.

    Raises:
        UserError: context parallelism does not support this model.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, ignored: int) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        check_model(inner)
        self.config = inner.config
        self.mesh = mesh
        self.ignored = ignored

    def cut(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's piece of a batch, on the batch's device. Cut batches before they are copied to a GPU, as reading
        their values there would make the host wait.

        Labels are shifted to where they are predicted before the row is cut, so a piece also has the label of its last
        token. An ignored column in front compensates for the shift in the task's loss: see :meth:`align`.

        Args:
            batch: ``input_ids`` and ``labels`` (B, L); an ``attention_mask`` may only mask padding on the right.

        Returns:
            ``input_ids`` and ``position_ids`` (B, P), and ``labels`` (B, P + 1).
        """
        pieces = {name: self._piece(tensor) for name, tensor in self._full_batch(batch).items()}
        return {**pieces, "labels": functional.pad(pieces["labels"], (1, 0), value=self.ignored)}

    def _piece(self, tensor_BL: Tensor) -> Tensor:
        """The chunks of this rank: one from the head, and its counterpart from the tail, as the ring expects them."""
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        chunks = tensor_BL.chunk(2 * ranks, dim=1)
        return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)

    @contextmanager
    def ring(self) -> Iterator[None]:
        """Context manager for the forward and backward of a piece, in which attention covers the whole sequence. Every
        rank of the mesh must enter it."""
        # the smallest tensor that torch can cut, as it requires one
        token_of_each_chunk = torch.zeros(1, 2 * self.mesh.size(), device=self.mesh.device_type)
        before, self.config._attn_implementation = self.config._attn_implementation, RING
        try:
            with context_parallel(
                self.mesh,
                buffers=[token_of_each_chunk],
                buffer_seq_dims=[1],
                no_restore_buffers={token_of_each_chunk},
            ):
                yield
        finally:
            self.config._attn_implementation = before

    def _full_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The padded full batch, with the labels shifted by one, to be split into two chunks per rank."""
        unknown = sorted(batch.keys() - FIELDS)
        if unknown:
            raise UserError(
                f"batches have fields that context parallelism cannot cut: {', '.join(unknown)}",
                where="parallel.context",
                remedy="set parallel.context=1, or leave them out of what the task collates",
            )
        mask_BL = batch.get("attention_mask")
        if mask_BL is not None and bool((mask_BL[:, 1:] > mask_BL[:, :-1]).any()):
            raise UserError(
                "with context parallelism there is no attention mask, so padding must be on the right",
                where="parallel.context",
                remedy="set parallel.context=1, or pad on the right in the task's collate",
            )
        tokens_BL, labels_BL = batch["input_ids"], batch["labels"]
        rows, length = tokens_BL.shape
        rest = -length % (2 * self.mesh.size() * DEVICES[self.mesh.device_type])
        # padding tokens get no positions of their own, as the model may have none left
        positions_L = torch.arange(length + rest, device=tokens_BL.device).clamp(max=length - 1)
        return {
            "input_ids": functional.pad(tokens_BL, (0, rest)),
            "labels": functional.pad(labels_BL[:, 1:], (0, rest + 1), value=self.ignored),
            "position_ids": positions_L.repeat(rows, 1),
        }

    def align(self, outputs: Any) -> Any:
        """Append one position of zeros to the logits: (B, P + 1, V). A task pairs all positions but the last with all
        labels but the first, so it drops only that position and the ignored first label."""
        outputs.logits = functional.pad(outputs.logits, (0, 0, 0, 1))
        return outputs

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that share a sequence, in place."""
        dist.all_reduce(tensor, group=self.mesh.get_group())
        return tensor


def check_model(model: nn.Module) -> None:
    """Refuse a model, with or without weights, that context parallelism does not support."""

    def fault(what: str, remedy: str = "set parallel.context=1") -> UserError:
        return UserError(f"{what} cannot be cut along the sequence", where="parallel.context", remedy=remedy)

    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if config is None or family not in FAMILIES:
        raise fault(
            f"a {family or type(model).__name__} model",
            f"set parallel.context=1; these families can be cut: {', '.join(sorted(FAMILIES))}",
        )
    # a configuration without layer types has the same attention in all layers
    every_layer = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    partial = set(getattr(config, "layer_types", None) or [every_layer]) - {"full_attention"}
    if partial:
        raise fault(f"a {family} model with layers of {', '.join(sorted(partial))}")
    if config._attn_implementation != "sdpa":
        raise fault(f"a {family} model with {config._attn_implementation} attention", "set task.attention=sdpa")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention over the tokens of all ranks: inside ``context_parallel``, torch's sdpa is ring attention."""
    if dropout:
        raise UserError(
            "torch's ring attention has no dropout: its backward pass would drop other weights than its forward pass",
            where="parallel.context",
            remedy="set the model's attention dropout to 0 (attention_dropout, GPT-2's attn_pdrop), "
            "or parallel.context=1",
        )
    groups = query.shape[1] // key.shape[1]
    if query.dtype == torch.float32 and groups > 1:  # the fp32 kernel needs as many key heads as query heads
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    others["is_causal"] = True
    with sdpa_kernel(KERNELS):
        return sdpa_attention_forward(module, query, key, value, None, **others)


AttentionInterface.register(RING, _attend)
