"""The device mesh of torch, with an axis for each of ``ParallelDims``."""

from dataclasses import astuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from drawbar.config.parallel_dims import AXES, ParallelDims
from drawbar.runtime.torch_internals import compute_local_shape_and_global_offset


def replica_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups of this rank along the axes on which ranks hold the same buffers: all but the pipeline's."""
    return [mesh.get_group(axis) for axis in AXES if axis != "pp" and mesh[axis].size() > 1]


def build_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """The mesh with all five axes; every rank calls it, after joining its ``Distributed``."""
    return init_device_mesh(device.type, astuple(dims), mesh_dim_names=AXES)


def another_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """A group of the ranks along an axis that is not the axis' own: messages in one do not wait for those in the other.
    Every rank calls it.

    Args:
        mesh: with all five axes.
    """
    along = mesh.mesh.movedim(AXES.index(axis), -1).flatten(0, -2)
    group, _ = dist.new_subgroups_by_enumeration(along.tolist())
    assert group is not None, "every rank is somewhere along each axis"
    return group


def local_shape_and_offset(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's shard of a DTensor, and where it begins in the full tensor; any other tensor is full."""
    if not isinstance(tensor, DTensor):
        return tensor.shape, (0,) * tensor.dim()
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
