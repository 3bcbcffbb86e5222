"""The two ways to save: rank 0 gathers and writes full tensors, or each rank writes its own part. A layout copies the
state of a step on all ranks, and returns a function that writes the copy from the background thread.
"""

import json
import zlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, Protocol

import torch

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import Snapshot, decode_state, encode_state, step_name
from drawbar.checkpoint.space import DiskFault
from drawbar.checkpoint.tensor_index import PartRecord
from drawbar.checkpoint.write import write_common_files, write_part
from drawbar.distributed.background_messages import BackgroundMessages
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.local_shards import LocalShards, ShardCopier
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.seed import rng_state


class SavePhases:
    """The phases of one save, on the background threads of all ranks.

    In each phase some ranks, the workers, do something. Rank 0 receives the result of each of them, even if one has
    failed, and then notifies the waiting followers whether all succeeded. So no follower starts the next phase too
    early or after a failure.

    Args:
        undo: removes the files of the save. Called on rank 0 when a phase has failed, once it has heard from every
            worker or given up on lost ones.
    """

    def __init__(self, messages: BackgroundMessages, rank: int, undo: Callable[[], None]) -> None:
        self._messages = messages
        self._rank = rank
        self._undo = undo

    def run(
        self, name: str, work: Callable[[], bytes], workers: Collection[int], followers: Collection[int], activity: str
    ) -> list[bytes]:
        """Run a phase. Every rank of ``workers`` and ``followers``, and rank 0, must call it.

        Args:
            workers: the ranks that call ``work``.
            followers: the ranks that continue only if all workers succeed; always includes rank 0.
            activity: what the workers do, for the log and errors of the ranks that wait for them.

        Returns:
            The workers' results on rank 0; nothing on other ranks.

        Raises:
            Exception: what ``work`` has raised here; on rank 0 and on followers a UserError where it has failed on
                another rank; or a rank is lost.
        """
        if self._rank == 0:
            return self._lead(name, work, workers, followers, activity)
        failure: Exception | None = None
        if self._rank in workers:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - it is raised below
                failure = error
            self._messages.send(name, encode_result(failure or result))
        if self._rank in followers:
            verdict = self._messages.receive(f"{name}-{self._rank}", 0, activity)
            try:
                decode_result(verdict, 0)
            except UserError as error:
                raise failure or error from None
        if failure is not None:
            raise failure
        return []

    def _lead(
        self, name: str, work: Callable[[], bytes], workers: Collection[int], followers: Collection[int], activity: str
    ) -> list[bytes]:
        results: list[bytes] = []
        errors: list[Exception] = []
        for rank in workers:
            try:
                message = None if rank == 0 else self._messages.receive(name, rank, activity)
                results.append(work() if message is None else decode_result(message, rank))
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)
        # a fault of a disk may be tolerated: another error counts first
        failure = min(errors, key=lambda error: isinstance(error, DiskFault), default=None)
        for rank in followers:
            if rank != 0:
                self._messages.send(f"{name}-{rank}", encode_result(failure or b""))
        if failure is not None:
            self._undo()
            raise failure
        return results


def encode_result(result: bytes | Exception) -> bytes:
    """The message in which a rank sends what it has done, or its error."""
    if isinstance(result, bytes):
        return zlib.compress(b"+" + result, level=1)
    known = result if isinstance(result, UserError) else UserError(repr(result), remedy="see the log of that rank")
    is_of_disk = isinstance(result, DiskFault)
    text = {"what": known.what, "where": known.where, "remedy": known.remedy, "is_of_disk": is_of_disk}
    return zlib.compress(b"-" + json.dumps(text).encode())


def decode_result(message: bytes, rank: int) -> bytes:
    """Inverse of ``encode_result``. Raises UserError where the rank has sent an error."""
    text = zlib.decompress(message)
    if text[:1] == b"+":
        return text[1:]
    fields = json.loads(text[1:])
    where = fields["where"] or f"rank {rank}"
    kind = DiskFault if fields["is_of_disk"] else UserError
    raise kind(fields["what"], where=where, remedy=fields["remedy"], exit_code=ExitCode.FAILED)


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
    """``checkpoint.layout``, with ``auto`` resolved: parts if the state is large and all nodes share a disk."""
    if setting != "auto":
        return setting
    return "parts" if shares_disk and checkpoint_bytes(engine) > MAX_WHOLE_BYTES else "whole"


def checkpoint_bytes(engine: Engine, optimizer_share: float | None = None) -> int:
    """Approximate size of a full checkpoint, in bytes.

    Args:
        optimizer_share: bytes of optimizer state per byte of trained weights. None if unknown: the most that any
            optimizer needs is assumed, so that any disk that is too small is refused at startup.
    """
    sizes = {True: 0, False: 0}
    for parameter in engine.meta_model.parameters():
        sizes[parameter.requires_grad] += parameter.numel() * parameter.element_size()
    if optimizer_share is None:  # up to two more numbers for each trained weight, or two of a part of the size
        optimizer_share = {"fp32": 2.0, "bf16": 1.0, "int8": 0.51}[engine.config.optim.state_dtype]
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
    """Every rank writes its own shards; once all parts are on disk, they become one checkpoint. The background threads
    coordinate by messages (``SavePhases``)."""

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
        """Runs in the background thread of every rank. ``common`` is None except on rank 0."""
        name, everyone, first = step_name(step), range(self._world.size), (0,)
        phases = SavePhases(messages, self._world.rank, undo=partial(self._directory.discard, name))
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
    """A JSON copy of all values, so that an invalid one fails here rather than in the background thread."""
    return decode_state(encode_state(values | {"engine": engine}))


def _gather_rng_states(world: Distributed) -> dict[str, torch.Tensor] | None:
    """The RNG states of all ranks on rank 0; None on other ranks."""
    generators = world.gather(rng_state(world.device))
    if generators is None:
        return None
    return {
        f"{rng_key(world, rank)}/{name}": tensor
        for rank, states in enumerate(generators)
        for name, tensor in states.items()
    }


def rng_key(world: Distributed, rank: int) -> str:
    """The key of a rank's RNG state in a checkpoint: its seed rank (``ParallelDims.seed_rank``), which is the same for
    ranks that must draw the same numbers, so that they restore the same state under any parallel layout."""
    return f"seed-{world.dims.seed_rank(rank):04d}"
