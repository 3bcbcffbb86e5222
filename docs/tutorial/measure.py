"""Measure what each strategy keeps on a rank and sends in a step, for the tutorial.

``python docs/tutorial/measure.py`` trains a small Llama for two steps under every layout of ``layouts.py`` (gloo, CPU),
and writes ``measured.json``; then it writes tables and figures anew, as `make docs` does. All numbers are counted, not
timed: they are the same on every machine.
"""

import json
import sys
from pathlib import Path
from typing import Any

# the harness of the tests starts the ranks
sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in ("docs/tutorial", "tests"))

import torch
import torch.distributed as dist
from layouts import LAYOUTS, MODEL, ROWS, TOKENS, VOCABULARY, Layout
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from write_pages import MEASURED, write_pages

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import CausalLMConfig, DataSection, OptimSection, RunConfig, TrainSection
from drawbar.data.loader import MicroBatch
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.engine import Engine
from drawbar.parallel.zero1 import local_optimizer
from drawbar.tasks.batch import Batch
from harness import run_ranks
from ring_on_cpu import teach_cpu
from tiny import CPU, Numbers, tiny_engine


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, by the collective's name.

    A collective is taken to run as a ring does, which is optimal in bytes (Patarasuk and Yuan 2009): of n bytes on R
    ranks, an all-gather and a reduce-scatter send n (R − 1) / R, an all-reduce twice that.
    """

    NAMES = {"allreduce": "all-reduce", "all_reduce": "all-reduce", "allgather": "all-gather"}
    NAMES |= {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all"}
    NAMES |= {"alltoall": "all-to-all", "broadcast": "broadcast", "send": "send"}
    SMALL = 1024
    """Bytes up to which a collective is not counted: norms, losses and numbers of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # let it call its collectives first, outside of this mode, which then sees them
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._opname.strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: Any) -> None:
        name = next((ours for theirs, ours in self.NAMES.items() if operator.startswith(theirs)), None)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        size = max((tensor.nbytes for tensor in tensors), default=0)
        if name is None or size <= self.SMALL:
            return
        group = group_of(args)
        ranks, rank = group.size(), group.rank()
        if name == "all-gather" and operator == "all_gather_into_tensor":
            size *= ranks  # this operator is given its input alone
        share = (ranks - 1) / ranks
        factor = {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": share, "all-to-all": share}
        if name == "broadcast":  # along a chain: all but the last rank pass it on
            root = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
            factor["broadcast"] = 0 if (rank - root) % ranks == ranks - 1 else 1
        self.sent[name] = self.sent.get(name, 0) + round(size * factor.get(name, 1))


def group_of(args: Any) -> dist.ProcessGroup:
    """The process group among the arguments of a collective: itself, or its name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument)
            except RuntimeError:  # another object, such as a ReduceOp
                continue
    name = next(argument for argument in reversed(args) if isinstance(argument, str))
    return dist.distributed_c10d._resolve_process_group(name)


class Activations:
    """The most bytes that autograd keeps at once for the backward pass, without the parameters' own."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kept, self.now, self.peak = module, {}, 0, 0

    def __enter__(self) -> "Activations":
        self._hooks = saved_tensors_hooks(lambda tensor: Kept(self, tensor), lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def parameters(self) -> set[int]:
        return {storage(parameter.data) for parameter in self.module.parameters()}


class Kept:
    """A tensor that autograd keeps; its storage counts once, from the first that keeps it to the last."""

    def __init__(self, all_kept: Activations, tensor: torch.Tensor) -> None:
        self.all_kept, self.tensor, self.storage = all_kept, tensor, storage(tensor)
        self.counts = tensor.layout is torch.strided and self.storage not in all_kept.parameters()
        if self.counts:
            uses = all_kept.kept.get(self.storage, 0)
            all_kept.kept[self.storage] = uses + 1
            if not uses:
                all_kept.now += local(tensor).untyped_storage().nbytes()
                all_kept.peak = max(all_kept.peak, all_kept.now)

    def __del__(self) -> None:
        if self.counts:
            self.all_kept.kept[self.storage] -= 1
            if not self.all_kept.kept[self.storage]:
                self.all_kept.now -= local(self.tensor).untyped_storage().nbytes()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def config_of(layout: Layout) -> RunConfig:
    return RunConfig(
        task=CausalLMConfig(model="llama", from_scratch={**MODEL, "vocab_size": VOCABULARY}),
        data=DataSection(sequence_length=TOKENS),
        train=TrainSection(steps=10),
        optim=OptimSection(lr=1e-3, schedule="constant"),
        precision="fp32",
        device="cpu",
        parallel=layout.settings,
    )


def micro_batches(task: Numbers, layout: Layout, dp_rank: int, dp_size: int) -> list[MicroBatch[Batch]]:
    """This rank's share of a global batch that is the same for every layout."""
    tokens = torch.randint(256, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0)).numpy()
    rows = [
        {"input_ids": row.astype("int32"), "labels": row.astype("int32"), "id": i, "ids": [i]}
        for i, row in enumerate(tokens)
    ]
    own = rows[dp_rank::dp_size]
    size = len(own) // layout.micro_batches
    return [MicroBatch(task.collate(own[first : first + size])) for first in range(0, len(own), size)]


def measure(layout: Layout) -> dict[str, Any]:
    """On each rank: bytes that it keeps and sends, and the losses of two steps."""
    if layout.settings.context > 1:
        teach_cpu()
    with Distributed(RankInfo.from_environment(), CPU, 60, ParallelDims.of(layout.settings, layout.ranks)) as world:
        engine = tiny_engine(config_of(layout), world)
        batch = micro_batches(engine.task, layout, world.dp_ranks.rank, world.dp_ranks.size)
        losses = [float(engine.train_step(batch).loss)]  # the first step makes the optimizer's state
        gradients: list[int] = []
        look = engine.inspecting(lambda: gradients.append(bytes_of(p.grad for p in engine.module.parameters())))
        with Traffic() as traffic, Activations(engine.module) as kept, look:
            losses.append(float(engine.train_step(batch).loss))
        found = {
            "parameters": bytes_of(engine.module.parameters()),
            "gradients": gradients[0],
            "optimizer": optimizer_bytes(engine),
            "activations": kept.peak,
            "sent": dict(sorted(traffic.sent.items())),
            "losses": losses,
        }
        engine.close()
        return found


def bytes_of(tensors: Any) -> int:
    return sum(local(tensor).nbytes for tensor in tensors if tensor is not None)


def optimizer_bytes(engine: Engine) -> int:
    """Of the moments; the counters of steps are left out."""
    states = [state for one in engine.updater.optimizers for state in local_optimizer(one).state.values()]
    return bytes_of(leaf for state in states for leaf in state.values() if torch.is_tensor(leaf) and leaf.ndim > 0)


def measure_all(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """By name of the layout: what each of its ranks found."""
    return {name: run_ranks(measure, LAYOUTS[name].ranks, LAYOUTS[name]) for name in names}


if __name__ == "__main__":
    MEASURED.write_text(json.dumps(measure_all(list(LAYOUTS)), indent=1) + "\n", encoding="utf-8")
    for path in write_pages():
        print(path)
