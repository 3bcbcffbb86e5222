"""torch's device mesh, with an axis for each of ``ParallelDims``."""

from dataclasses import astuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from drawbar.config.parallel_dims import AXES, ParallelDims
from drawbar.distributed.process_group import Distributed
from drawbar.runtime.torch_internals import compute_local_shape_and_global_offset


def replica_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """This rank's groups along the axes on which ranks hold the same buffers: all but the pipeline axis."""
    return [mesh.get_group(axis) for axis in AXES if axis != "pp" and mesh[axis].size() > 1]


def build_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """The mesh with all five axes. Collective; call it inside the ``Distributed`` context."""
    return init_device_mesh(device.type, astuple(dims), mesh_dim_names=AXES)


def mesh_of(world: Distributed) -> DeviceMesh:
    """The mesh of a run. The same if its model is built again, as each mesh has process groups of its own."""
    if world.dims not in world.meshes:
        world.meshes[world.dims] = build_mesh(world.dims, world.device)
    return world.meshes[world.dims]


def another_group(world: Distributed, axis: str) -> dist.ProcessGroup:
    """A second group of the ranks along an axis of the run's mesh, so that messages in one group do not wait for those
    in the other. The same if the model is built again. Collective."""
    if axis not in world.second_groups:
        along = mesh_of(world).mesh.movedim(AXES.index(axis), -1).flatten(0, -2)
        group, _ = dist.new_subgroups_by_enumeration(along.tolist())
        assert group is not None, "every rank is somewhere along each axis"
        world.second_groups[axis] = group
    return world.second_groups[axis]


def local_shape_and_offset(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's shard of a DTensor, and its offset in the full tensor; other tensors count as full."""
    if not isinstance(tensor, DTensor):
        return tensor.shape, (0,) * tensor.dim()
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
