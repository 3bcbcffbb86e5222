"""The two layouts of checkpoints: full tensors written by one rank, or parts written by each rank. A layout copies the
state of a step on all ranks, and returns the function that writes the copy in the background thread.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import torch

from drawbar.checkpoint.checked_files import check_local_files, read_manifest
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot, decode_state, encode_state, step_name
from drawbar.checkpoint.part_commit import COMMON_FILES, wait_until_visible, with_checksums, write_common_files
from drawbar.checkpoint.part_placement import PartPlacement
from drawbar.checkpoint.part_record import PartRecord
from drawbar.checkpoint.part_writer import rank_of_part, write_part
from drawbar.config.schema.run_config import CheckpointSection
from drawbar.distributed.background_messages import BackgroundMessages
from drawbar.distributed.file_exchange import FileExchange
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.local_shards import LocalShards, ShardCopier
from drawbar.runtime.seed import rng_state
from drawbar.train.save_phases import SavePhases
from drawbar.train.shared_disks import Disks
from drawbar.util.atomic_files import sync

Write = Callable[[], None]
"""Writes the copied state; runs in the background thread, and raises UserError for disk errors."""
Values = dict[str, Any]
"""JSON values of a checkpoint's state, by name: see ``Snapshot.state``."""
EnsureFreeSpace = Callable[[int], None]
"""Called in the background thread before anything is written, with the bytes that this disk gets of the checkpoint:
raises DiskFault where the disk has less free space."""

MAX_WHOLE_BYTES = 2 * 2**30
"""Bytes of a state above which ``checkpoint.layout: auto`` writes it in parts."""


class CheckpointLayout(Protocol):
    """Interface of the two layouts."""

    def copy(self, step: int, values: Values, ensure_free_space: EnsureFreeSpace) -> Write | None:
        """Copy the state to host memory. Collective. The copy of an earlier step must have been written and freed.

        Args:
            values: the checkpoint's state without the entry ``engine``, which is added here.
            ensure_free_space: called by one rank for each disk.

        Returns:
            The function that writes this rank's copy; None on a rank that writes nothing.
        """


def choose_layout(setting: Literal["auto", "whole", "parts"], engine: Engine, disks: Disks) -> str:
    """``checkpoint.layout``, with ``auto`` resolved: parts where the state is large, and all ranks see one disk."""
    if setting != "auto":
        return setting
    in_parts = disks.shared and checkpoint_bytes(engine) > MAX_WHOLE_BYTES
    return "parts" if in_parts else "whole"


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


def bytes_on_disk(config: CheckpointSection, engine: Engine, disks: Disks) -> int:
    """About how many bytes of each checkpoint one disk gets."""
    count = len(disks.disk_leaders)
    in_parts = choose_layout(config.layout, engine, disks) == "parts"
    return checkpoint_bytes(engine) * (min(config.copies, count) if in_parts else count) // count


class WholeTensorsLayout:
    """One rank gathers the full tensors and writes them; where nodes share no disk, one rank for each disk."""

    def __init__(self, directory: CheckpointDirectory, engine: Engine, world: Distributed, disks: Disks) -> None:
        self._directory = directory
        self._engine = engine
        self._world = world
        self._disks = disks

    def copy(self, step: int, values: Values, ensure_free_space: EnsureFreeSpace) -> Write | None:
        state = self._engine.state(self._disks.disk_leaders)
        rng = _gather_rng_states(self._world, on_all=not self._disks.shared)
        if rng is None or not self._disks.is_disk_leader:
            return None
        snapshot = Snapshot(step, state.model, state.optimizer, rng, _plain(values, state.values))
        return partial(self._write, snapshot, ensure_free_space)

    def _write(self, snapshot: Snapshot, ensure_free_space: EnsureFreeSpace) -> None:
        ensure_free_space(snapshot.nbytes())
        self._directory.write(snapshot)


class PartsLayout:
    """Every rank writes its own shards; one checkpoint is made of all parts, once they are on the disk.

    The background threads coordinate by messages (``SavePhases``). Where nodes share no disk, one rank for each disk
    (``Disks.disk_leaders``) copies the parts there to the next disks, and no disk gives the checkpoint its name before
    all have what belongs on them.

    Args:
        copies: on how many disks each part is to be; all disks, where there are fewer.
    """

    def __init__(
        self, directory: CheckpointDirectory, engine: Engine, world: Distributed, disks: Disks, copies: int
    ) -> None:
        self._directory = directory
        self._copier = ShardCopier(engine, world)
        self._world = world
        self._disks = disks
        self._count = 0
        self._placement = PartPlacement(disks.ranks_by_disk, min(copies, len(disks.disk_leaders)))
        self._exchange = None if disks.shared else FileExchange(world, disks.disk_leaders)
        self._own_files: list[str] = []
        """The files of the save that the ranks of this disk have written, by the manifest."""

    def copy(self, step: int, values: Values, ensure_free_space: EnsureFreeSpace) -> Write | None:
        shards = self._copier.copy()
        own = self._placement.disk_of(self._world.rank)
        here = {*self._placement.ranks_on(own)}
        sizes = [shards.nbytes() if rank == self._world.rank else 0 for rank in range(self._world.size)]
        needed = sum(size for rank, size in enumerate(self._world.sum_counts(sizes)) if rank in here)
        rng = _gather_rng_states(self._world, on_all=False)
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
        name, everyone, leaders = step_name(step), range(self._world.size), self._disks.disk_leaders
        undo = partial(self._directory.discard, name) if self._disks.is_disk_leader else lambda: None
        phases = SavePhases(messages, self._world.rank, undo)
        begin = partial(self._begin, name, ensure_free_space)
        write_part = partial(self._write_part, step, shards)
        with messages.at_work():
            phases.run("folder", begin, leaders, everyone, f"making the folder of {name}")
            records = phases.run("part", write_part, everyone, leaders, f"writing its part of {name}")
            if not self._disks.is_disk_leader:
                return
            write_common = partial(self._write_common_files, step, records, common)
            phases.run("common", write_common, (0,), leaders, f"writing the index of {name}")
            if self._exchange is not None:
                send = partial(self._send_common_files, step, self._exchange)
                phases.run("manifest", send, leaders, leaders, f"sending the index of {name}")
                copy_parts = partial(self._copy_parts, step, self._exchange)
                phases.run("copies", copy_parts, leaders, leaders, f"copying parts of {name}")
            commit = partial(self._commit, name)
            phases.run("commit", commit, leaders, leaders, f"renaming the folder of {name}")

    def _begin(self, name: str, ensure_free_space: Callable[[], None]) -> bytes:
        ensure_free_space()
        self._directory.begin_write(name)
        return b""

    def _write_part(self, step: int, shards: LocalShards) -> bytes:
        folder = self._directory.folder_of_parts(step)
        with self._directory.explain_write_errors(f"the part of rank {self._world.rank} of {step_name(step)}"):
            return write_part(folder, self._world.rank, shards.model, shards.optimizer, shards.tied).to_json()

    def _write_common_files(
        self, step: int, records: list[bytes], common: tuple[Values, dict[str, torch.Tensor]] | None
    ) -> bytes:
        assert common is not None
        placement = None if self._disks.shared else self._placement
        with self._directory.explain_write_errors(step_name(step)):
            folder = self._directory.folder_of_parts(step)
            write_common_files(folder, step, map(PartRecord.from_json, records), *common, placement)
        return b""

    def _send_common_files(self, step: int, exchange: FileExchange) -> bytes:
        """Copy the common files (index, state, RNG states, manifest) from the disk of rank 0 to all others."""
        folder = self._directory.folder_of_parts(step)
        files = [folder / name for name in COMMON_FILES]
        outgoing = dict.fromkeys(self._disks.disk_leaders[1:], files) if self._world.is_rank0 else {}
        with self._directory.explain_write_errors(step_name(step)):
            for path in exchange.exchange(outgoing, folder):
                sync(path)
            manifest = read_manifest(folder)
            ranks, sizes = self._placement.ranks[self._placement.disk_of(self._world.rank)], manifest.sizes()
            self._own_files = with_checksums(name for name in manifest.parts or {} if rank_of_part(name) in ranks)
            wait_until_visible(folder, {name: sizes[name] for name in self._own_files})
        return b""

    def _copy_parts(self, step: int, exchange: FileExchange) -> bytes:
        """Copy the parts of every disk to the next disks (``PartPlacement``)."""
        folder, placement = self._directory.folder_of_parts(step), self._placement
        files = [folder / name for name in self._own_files]  # nothing is read here: the others wait in the exchange
        next_disks = placement.next_disks(placement.disk_of(self._world.rank))
        outgoing = {self._disks.disk_leaders[disk]: files for disk in next_disks}
        with self._directory.explain_write_errors(f"the copies of parts of {step_name(step)}"):
            for path in exchange.exchange(outgoing, folder):
                sync(path)
            sync(folder)
        check_local_files(folder)
        return b""

    def _commit(self, name: str) -> bytes:
        self._directory.finish_write(name, lambda folder: None)
        return b""


def _plain(values: Values, engine: Values) -> Values:
    """A JSON copy of all values, so that an invalid one fails here, and not in the background thread."""
    return decode_state(encode_state(values | {"engine": engine}))


def _gather_rng_states(world: Distributed, on_all: bool) -> dict[str, torch.Tensor] | None:
    """The RNG states of all ranks, on rank 0 or on all ranks; elsewhere None."""
    own = rng_state(world.device)
    generators = world.all_gather(own) if on_all else world.gather(own)
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
