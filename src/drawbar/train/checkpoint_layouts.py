"""The two ways to save: rank 0 gathers and writes full tensors, or each rank writes its own part. A layout copies the
state of a step on all ranks, and returns the function that writes the copy in the background thread.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot, decode_state, encode_state, step_name
from drawbar.checkpoint.tensor_index import PartRecord
from drawbar.checkpoint.write import write_common_files, write_part
from drawbar.distributed.background_messages import BackgroundMessages
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.local_shards import LocalShards, ShardCopier
from drawbar.runtime.seed import rng_state
from drawbar.train.save_phases import SavePhases

Write = Callable[[], None]
"""Writes the copied state; runs in the background thread, and raises UserError for disk errors."""
Values = dict[str, Any]
"""JSON values of a checkpoint's state, by name: see ``Snapshot.state``."""
EnsureFreeSpace = Callable[[int], None]
"""Called in the background thread before anything is written, with the bytes of the checkpoint: raises DiskFault
where the disk has less free space."""

MAX_WHOLE_BYTES = 2 * 2**30
"""Bytes of a state above which ``checkpoint.layout: auto`` writes it in parts."""


class CheckpointLayout(Protocol):
    """Interface of the two layouts."""

    def copy(self, step: int, values: Values, ensure_free_space: EnsureFreeSpace) -> Write | None:
        """Copy the state to host memory. Collective. The copy of an earlier step must have been written and freed.

        Args:
            values: the checkpoint's state without the entry ``engine``, which is added here.
            ensure_free_space: called by rank 0.

        Returns:
            The function that writes this rank's copy; None on a rank that writes nothing.
        """


def choose_layout(setting: Literal["auto", "whole", "parts"], engine: Engine, shares_disk: bool) -> str:
    """``checkpoint.layout``, with ``auto`` resolved: parts where the state is large, and all nodes see one disk."""
    if setting != "auto":
        return setting
    return "parts" if shares_disk and checkpoint_bytes(engine) > MAX_WHOLE_BYTES else "whole"


def checkpoint_bytes(engine: Engine, optimizer_share: float | None = None) -> int:
    """About how large a full checkpoint is.

    Args:
        optimizer_share: bytes of the optimizer's state for each byte of a trained weight; None if not known, and then
            the most that any optimizer has, so that a start refuses every disk that is too small.
    """
    sizes = {True: 0, False: 0}
    for parameter in engine.meta_model.parameters():
        sizes[parameter.requires_grad] += parameter.numel() * parameter.element_size()
    if optimizer_share is None:  # up to two more numbers for each trained weight, or two of half the size
        optimizer_share = 2 if engine.config.optim.state_dtype == "fp32" else 1
    optimizer = round(optimizer_share * sizes[True])
    # with LoRA, frozen weights are not saved
    return optimizer + sizes[True] + (sizes[False] if engine.config.lora is None else 0)


class WholeTensorsLayout:
    """Rank 0 gathers the full tensors and writes them."""

    def __init__(self, directory: CheckpointDirectory, engine: Engine, world: Distributed) -> None:
        self._directory = directory
        self._engine = engine
        self._world = world

    def copy(self, step: int, values: Values, ensure_free_space: EnsureFreeSpace) -> Write | None:
        state = self._engine.state()
        rng = _gather_rng_states(self._world)
        if rng is None:
            return None
        snapshot = Snapshot(step, state.model, state.optimizer, rng, _plain(values, state.values))
        return partial(self._write, snapshot, ensure_free_space)

    def _write(self, snapshot: Snapshot, ensure_free_space: EnsureFreeSpace) -> None:
        ensure_free_space(snapshot.nbytes())
        self._directory.write(snapshot)


class PartsLayout:
    """Every rank writes its own shards; one checkpoint is made of all parts, once they are on the disk. The background
    threads coordinate by messages (``SavePhases``)."""

    def __init__(self, directory: CheckpointDirectory, engine: Engine, world: Distributed) -> None:
        self._directory = directory
        self._copier = ShardCopier(engine, world)
        self._world = world
        self._count = 0

    def copy(self, step: int, values: Values, ensure_free_space: EnsureFreeSpace) -> Write | None:
        shards = self._copier.copy()
        [needed] = self._world.sum_counts([shards.nbytes()])
        rng = _gather_rng_states(self._world)
        common = None if rng is None else (_plain(values, shards.values), rng)
        self._count += 1
        messages = BackgroundMessages(self._world, f"save-{self._count}")
        return partial(self._write, step, shards, common, messages, partial(ensure_free_space, needed))

    def _write(
        self,
        step: int,
        shards: LocalShards,
        common: tuple[Values, dict[str, torch.Tensor]] | None,
        messages: BackgroundMessages,
        ensure_free_space: Callable[[], None],
    ) -> None:
        """Runs in the background thread of every rank. ``common`` is None but on rank 0."""
        name, everyone, first = step_name(step), range(self._world.size), (0,)
        undo = partial(self._directory.discard, name) if self._world.is_rank0 else lambda: None
        phases = SavePhases(messages, self._world.rank, undo)
        begin = partial(self._begin, name, ensure_free_space)
        write_part = partial(self._write_part, step, shards)
        with messages.at_work():
            phases.run("folder", begin, first, everyone, f"making the folder of {name}")
            records = phases.run("part", write_part, everyone, first, f"writing its part of {name}")
            if common is not None:
                parts = map(PartRecord.from_json, records)
                self._directory.finish_write(name, lambda folder: write_common_files(folder, step, parts, *common))

    def _begin(self, name: str, ensure_free_space: Callable[[], None]) -> bytes:
        ensure_free_space()
        self._directory.begin_write(name)
        return b""

    def _write_part(self, step: int, shards: LocalShards) -> bytes:
        folder = self._directory.folder_of_parts(step)
        with self._directory.explain_write_errors(f"the part of rank {self._world.rank} of {step_name(step)}"):
            return write_part(folder, self._world.rank, shards.model, shards.optimizer, shards.tied).to_json()


def _plain(values: Values, engine: Values) -> Values:
    """A JSON copy of all values, so that an invalid one fails here, and not in the background thread."""
    return decode_state(encode_state(values | {"engine": engine}))


def _gather_rng_states(world: Distributed) -> dict[str, torch.Tensor] | None:
    """The RNG states of all ranks, on rank 0; elsewhere None."""
    generators = world.gather(rng_state(world.device))
    if generators is None:
        return None
    return {
        f"{rng_key(world, rank)}/{name}": tensor
        for rank, states in enumerate(generators)
        for name, tensor in states.items()
    }


def rng_key(world: Distributed, rank: int) -> str:
    """The key of a rank's RNG state in a checkpoint: its seed rank (``ParallelDims.seed_rank``: the same for ranks that
    must draw the same numbers), so that they restore the same state, whatever the parallel layout at saving was."""
    return f"seed-{world.dims.seed_rank(rank):04d}"
