"""``train.micro_batch: auto`` on a CUDA device: the largest micro-batch that fits into memory, found by trial steps.

The result is saved in the run directory, so that a resumed run sums its gradients in the same order as before. A rank
that ran out of memory in a trial would leave the others hanging in a collective. So a trial of more than one row only
runs if the memory of earlier trials predicts that it fits, on all ranks.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from drawbar.config.rules.rule_table import MICRO_BATCH_TOKENS
from drawbar.config.schema.run_config import RunConfig
from drawbar.data.loader import Loader, MicroBatch, MicroBatchSize, Rows, SampleRows, TrainLoader, raw_batch
from drawbar.data.prefetch import RawBatch
from drawbar.engines.engine import Engine
from drawbar.engines.executors import ModelExecutor
from drawbar.engines.trial_step import future_optimizer_bytes, trial_step
from drawbar.engines.updaters import TorchUpdater
from drawbar.parallel.compile import uncompiled_blocks
from drawbar.runtime.log import logger
from drawbar.runtime.seed import rng_state, set_rng_state
from drawbar.tasks.batch import Batch
from drawbar.tasks.user_methods import name_failing_method
from drawbar.train.batches import batch_maker
from drawbar.util.atomic_files import write_durably

MICRO_BATCH_FILE = "micro_batch.json"
USABLE_SHARE = 0.9
"""Usable fraction of a device's memory. The rest is for fragmentation by steps of other sizes, for memory that an
update needs besides the optimizer's state, and for errors of the prediction in ``largest_that_fits``."""


class DeviceMemory(Protocol):
    """The memory of the device of this rank, in bytes."""

    @property
    def name(self) -> str:
        """The device model. Stored with the result: a run resumed on another model searches again."""

    def reset(self) -> None:
        """Free cached memory, and reset the peak."""

    def allocated(self) -> int:
        """Memory that tensors use now."""

    def peak(self) -> int:
        """Peak memory reserved on the device since ``reset``: tensors, and free memory between them."""

    def limit(self) -> int:
        """Upper bound on the memory that tensors could use."""


class CudaMemory:
    """``DeviceMemory`` of a CUDA device, which other processes may also use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        properties = torch.cuda.get_device_properties(self._device)
        return f"{properties.name}, {properties.total_memory >> 20} MiB"

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def limit(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a CUDA device; None for other devices: host memory is shared with other programs, and CPU cores
    gain nothing from larger micro-batches."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class FoundMicroBatch:
    """The micro-batch of a run, with the devices, number of ranks and settings it was found with."""

    size: MicroBatchSize
    found_with: Mapping[str, Any]

    def save(self, run_dir: Path) -> None:
        values = {**asdict(self.size), "found_with": self.found_with}
        write_durably(run_dir / MICRO_BATCH_FILE, json.dumps(values, ensure_ascii=False, indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "FoundMicroBatch | None":
        """The stored result of a run, or None."""
        path = run_dir / MICRO_BATCH_FILE
        if not path.exists():
            return None
        values = json.loads(path.read_text("utf-8"))
        return cls(MicroBatchSize(values["rows"], values["tokens"]), values["found_with"])


def fit_micro_batch(
    loader: Loader[Batch], engine: Engine, memory: DeviceMemory | None, run_dir: Path, resumed: bool
) -> FoundMicroBatch | None:
    """Set the loader's micro-batches to the largest that fit into memory. Collective.

    A resumed run keeps its stored size if nothing listed in ``_found_with`` has changed; without a stored size, it
    keeps the loader's micro-batches, of at most ``MICRO_BATCH_TOKENS`` tokens.

    Args:
        memory: None to leave the loader unchanged.
        run_dir: folder that may contain ``micro_batch.json``: that of the run whose checkpoint is resumed.
        resumed: whether the run resumes from a checkpoint, its own or that of ``--resume PATH``; False for a fork.

    Returns:
        The result to save; None without ``memory``, under ``dp`` or DeepSpeed, with micro-batches set by the user, in a
        resumed run without a result, in a pipeline (it holds several at once) and for a stream (longest row unknown).
    """
    train, world = engine.config.train, engine.world
    is_set = train.micro_batch != "auto" or train.micro_batch_tokens is not None
    if memory is None or is_set or engine.config.parallel.features.many_devices:
        return None
    if not isinstance(loader, TrainLoader) or not isinstance(engine.executor, ModelExecutor):
        return None
    if not isinstance(engine.updater, TorchUpdater):
        return None
    kept = world.from_rank0(lambda: FoundMicroBatch.load(run_dir), "looking for the run's micro-batch")
    if kept is None and resumed:
        return None
    found_with = _found_with(engine, memory)
    if kept is None or kept.found_with != found_with:
        kept = FoundMicroBatch(_probe(loader, engine, engine.updater, memory), found_with)
    loader.micro_batch = kept.size
    return kept


def _found_with(engine: Engine, memory: DeviceMemory) -> dict[str, Any]:
    settings = engine.config.model_dump(
        mode="json",
        exclude_defaults=True,  # otherwise new settings in a later drawbar would count as a change
        include={"parallel": True, "data": {"padding_free"}, "task": {"attention", "cross_entropy"}},
    )
    return {"devices": sorted(set(engine.world.all_gather(memory.name))), "ranks": engine.world.size, **settings}


def _probe(loader: TrainLoader[Batch], engine: Engine, updater: TorchUpdater, memory: DeviceMemory) -> MicroBatchSize:
    rows, world = loader.rows, engine.world
    make, to_come = batch_maker(engine.task, engine.config), future_optimizer_bytes(updater)

    def measure(count: int) -> Trial:
        world.set_activity(f"trying micro-batches of {count} rows")
        generators = rng_state(world.device)  # a user's collate may draw from them
        micro = MicroBatch(make(longest_rows(rows, count)))
        set_rng_state(generators, world.device)
        memory.reset()
        # uncompiled: compiled blocks need no more memory, and would be recompiled for each size; two micro-batches, as
        # the second one runs while the gradients of the first are in memory
        with name_failing_method(engine.task), uncompiled_blocks(), trial_step(engine, updater, [micro, micro]):
            resting = memory.allocated()
        return Trial(count, resting + to_come, memory.peak() + to_come)

    def fits(needed: float) -> bool:
        return world.sum_counts([int(needed <= USABLE_SHARE * memory.limit())]) == [world.size]

    has_tokens, longest = "input_ids" in rows.samples.fields, int(rows.lengths[:].max())
    trial = largest_that_fits(measure, fits, _most_rows(loader, engine.config, longest if has_tokens else None))
    memory.reset()
    size = MicroBatchSize(tokens=trial.rows * longest) if has_tokens else MicroBatchSize(rows=trial.rows)
    logger.info(
        "micro-batch: %s (%d of the longest rows); a step takes %.1f of %.1f GiB",
        *(f"{size.tokens:,} tokens" if has_tokens else f"{size.rows:,} rows", trial.rows),
        *(trial.peak / 2**30, memory.limit() / 2**30),
    )
    return size


def _most_rows(loader: TrainLoader[Batch], config: RunConfig, longest: int | None) -> int:
    """The most rows to try: a rank's share of the global batch; for padded rows, at most ``MICRO_BATCH_TOKENS`` tokens,
    as larger micro-batches contain more padding, which costs more than they gain.

    Args:
        longest: tokens of the longest row; None if rows have no tokens.
    """
    share = -(-loader.global_batch // loader.ranks.size)
    is_padded = config.data.batching == "padded" and config.data.padding_free is not True
    return share if longest is None or not is_padded else min(share, max(1, MICRO_BATCH_TOKENS // longest))


@dataclass(frozen=True)
class Trial:
    """The memory use of one trial step."""

    rows: int
    """Rows of its micro-batches."""
    resting: int
    """Bytes of weights, gradients and optimizer state."""
    peak: int
    """Peak memory, in bytes."""


def largest_that_fits(measure: Callable[[int], Trial], fits: Callable[[float], bool], most: int) -> Trial:
    """The largest trial that fits, of 1, 2, 4, … or ``most`` rows; the one-row trial even if it does not fit.

    At each moment of a step, memory is a constant plus a multiple of the rows. So the peak is convex in the rows:
    beyond the last two trials it may lie above the line through them, but by no more than the constants of two
    moments differ (a block gathered by FSDP, a chunk of logits).

    Args:
        fits: whether this many bytes are usable on the device of every rank.
    """
    largest = measure(1)
    bytes_per_row: float = largest.peak - largest.resting
    while largest.rows < most:
        more = min(2 * largest.rows, most) - largest.rows
        if not fits(largest.peak + bytes_per_row * more):
            break
        trial = measure(largest.rows + more)
        if not fits(trial.peak):
            break
        bytes_per_row = (trial.peak - largest.peak) / more
        largest = trial
    return largest


def longest_rows(rows: Rows, count: int) -> RawBatch:
    """The ``count`` longest rows, in tokens. For an encoder-decoder, up to twice as many rows: the sample with the
    longest input and the one with the longest target, each ``count`` times."""
    if not isinstance(rows, SampleRows):
        longest_first = np.argsort(-rows.lengths[:], kind="stable")
        return raw_batch(rows, longest_first[np.arange(count) % len(rows)], epoch=0)
    fields = rows.samples.fields
    sides = [name for name in fields if name in ("input_ids", "decoder_input_ids")] or list(fields)
    longest = {int(rows.samples.field_lengths(name).argmax()) for name in sides}
    return raw_batch(rows, np.repeat(sorted(longest), count), epoch=0)
