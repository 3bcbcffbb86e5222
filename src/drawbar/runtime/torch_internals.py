"""The private names of torch that drawbar uses: the one place to check when a new version of torch is released.

Names are imported from here: ``from drawbar.runtime.torch_internals import ReplicateModule``. They are imported on
first use, as some take seconds to import. A test looks for all of them in each tested version of torch.
"""

from importlib import import_module
from typing import Any

from drawbar.errors import UserError
from drawbar.util.versions import TESTED, installed

NAMES = {
    "DefaultReduceScatter": ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "FSDP that reduces in bf16"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "plan: process groups of one rank"),
    "FakeTensor": ("torch._subclasses.fake_tensor", "plan: tensors without memory"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "plan: tensors without memory"),
    "ReplicateModule": ("torch.distributed._composable.replicate_with_fsdp", "replicas on a mesh"),
    "ShardingPropagator": ("torch.distributed.tensor._sharding_prop", "plan: shapes of shards"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "the operators of a step"),
    "_BatchNorm": ("torch.nn.modules.batchnorm", "layers that mix the samples of a batch"),
    "_disable_current_modes": ("torch.utils._python_dispatch", "plan: what must run on real tensors"),
    "_dump_fr_trace_json": ("torch._C._distributed_c10d", "the newest collectives of a rank that waits"),
    "_foreach_add_": ("torch", "the steps of many parameters counted by one kernel"),
    "_foreach_copy_": ("torch", "moments of many parameters read by one kernel"),
    "_foreach_mul_": ("torch", "gradients clipped by one kernel"),
    "_foreach_norm": ("torch", "norms of all gradients by one kernel"),
    "_foreach_sub_": ("torch", "the steps of many parameters counted by one kernel"),
    "_resolve_process_group": ("torch.distributed.distributed_c10d", "plan: the ranks of a collective"),
    "_set_pg_timeout": ("torch.distributed.distributed_c10d", "before torch 2.14: timeouts of process groups"),
    "_world": ("torch.distributed.distributed_c10d", "timeouts of the groups of meshes and libraries"),
    "compute_local_shape_and_global_offset": ("torch.distributed.tensor._utils", "where a shard lies in its tensor"),
    "config": ("torch._inductor", "how many processes compile"),
    "on_compile_end": ("torch._dynamo", "how long compiling takes"),
    "on_compile_start": ("torch._dynamo", "how long compiling takes"),
    "replicate": ("torch.distributed._composable.replicate_with_fsdp", "replicas on a mesh"),
    "subprocess_handler": ("torch.distributed.elastic.multiprocessing.subprocess_handler", "ranks that are forked"),
    "tree_leaves": ("torch.utils._pytree", "the tensors of nested arguments"),
    "tree_map": ("torch.utils._pytree", "the tensors of nested arguments"),
}
"""Name → its module, and what drawbar uses it for."""


def __getattr__(name: str) -> Any:
    """
    Raises:
        UserError: the installed torch has no such name.
    """
    if name not in NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    module, purpose = NAMES[name]
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        first, last = TESTED["torch"]
        raise UserError(
            f"torch {installed('torch')} has no {module}.{name}, which drawbar uses ({purpose})",
            remedy=f"install a version of torch from {first} to {last}, with which drawbar is tested",
        ) from error
