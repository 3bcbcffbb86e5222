"""Context parallelism on CPUs: torch's ring attention has no CPU kernel, and is lent that of its plain attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from drawbar.parallel import context

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def teach_cpu() -> None:
    """Give torch's ring attention the kernel that plain attention has on CPUs."""

    def handler(run: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
        def handle(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
            mesh = args[0].device_mesh
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            assert given.pop("attn_mask", None) is None
            given = {name: item.to_local() if isinstance(item, DTensor) else item for name, item in given.items()}
            return tuple(DTensor.from_local(item, mesh, [Shard(2)]) for item in run(mesh.get_group(), 2, **given))

        return handle

    def forward(group: Any, seq_dim: int, **given: Any) -> Any:
        return ring._templated_ring_attention(group, seq_dim, FORWARD, **given)

    def backward(group: Any, seq_dim: int, **given: Any) -> Any:
        return ring._templated_ring_attention_backward(
            group, seq_dim, BACKWARD, given.pop("grad_out"), "grad_out", **given
        )

    qkv = ("query", "key", "value")
    flags = ("dropout_p", "is_causal")
    ring.custom_ops[FORWARD] = handler(forward, (*qkv, *flags))
    ring.custom_ops[BACKWARD] = handler(backward, ("grad_out", *qkv, "out", "logsumexp", *flags))
    context.DEVICES["cpu"] = 1
