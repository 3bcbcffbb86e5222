"""The device mesh of torch, with an axis for each of ``ParallelDims``."""

from dataclasses import astuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drawbar.config.parallel_dims import AXES, ParallelDims


def buffer_replicas(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups of this rank along the axes on which ranks hold the same buffers: all but the pipeline's."""
    return [mesh.get_group(axis) for axis in AXES if axis != "pp" and mesh[axis].size() > 1]


def build_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """The mesh with all five axes; every rank calls it, after joining its ``Distributed``."""
    return init_device_mesh(device.type, astuple(dims), mesh_dim_names=AXES)
