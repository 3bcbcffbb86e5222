"""``train.micro_batch: auto`` on a CUDA device: the largest micro-batch that fits into its memory, by trial steps.

It is kept in the run directory, so that a resumed run sums its gradients in the same order as before. A rank that ran
out of memory in a trial would leave the others in a collective. So a trial of more than one row is made only where the
memory of the trials before it says that it fits, on all ranks.
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
"""Of a device's memory. The rest is for fragments that steps of other sizes leave, for what an update takes besides the
optimizer's state, and for what ``largest_that_fits`` cannot foresee."""


class DeviceMemory(Protocol):
    """The memory of the device of this rank, in bytes."""

    @property
    def name(self) -> str:
        """The kind of device. It is stored with the size found: a run that goes on on another kind looks anew."""

    def reset(self) -> None:
        """Free what is kept for later tensors, and forget the peak."""

    def allocated(self) -> int:
        """What tensors have now."""

    def peak(self) -> int:
        """The most that was taken from the device at once since ``reset``: tensors, and what was free between them."""

    def limit(self) -> int:
        """The most that tensors could have."""


class CudaMemory:
    """``DeviceMemory`` of a CUDA device, which other processes may use, too."""

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
    """A CUDA device's memory; None elsewhere: other programs need a host's memory, too, and its cores gain nothing from
    larger micro-batches."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class FoundMicroBatch:
    """The micro-batch of a run, and the devices, number of ranks and settings with which it was found."""

    size: MicroBatchSize
    found_with: Mapping[str, Any]

    def save(self, run_dir: Path) -> None:
        values = {**asdict(self.size), "found_with": self.found_with}
        write_durably(run_dir / MICRO_BATCH_FILE, json.dumps(values, ensure_ascii=False, indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "FoundMicroBatch | None":
        """None where the run has none."""
        path = run_dir / MICRO_BATCH_FILE
        if not path.exists():
            return None
        values = json.loads(path.read_text("utf-8"))
        return cls(MicroBatchSize(values["rows"], values["tokens"]), values["found_with"])


def fit_micro_batch(
    loader: Loader[Batch], engine: Engine, memory: DeviceMemory | None, run_dir: Path, resumed: bool
) -> FoundMicroBatch | None:
    """Set the loader's micro-batches to what fits into the memory. Every rank calls it.

    A resumed run keeps its stored size, if nothing that ``_found_with`` lists has changed; without a stored size, it
    keeps the loader's micro-batches, of at most ``MICRO_BATCH_TOKENS`` tokens.

    Args:
        memory: None to leave the loader as it is.
        run_dir: where ``micro_batch.json`` is, if there is one: that of the run whose checkpoint is resumed.
        resumed: whether the run goes on from a checkpoint, its own or that of ``--resume PATH``; False for a fork.

    Returns:
        What to save; None without ``memory``, under ``dp`` or DeepSpeed, with micro-batches set by hand, in a
        resumed run that found nothing, in a pipeline (it holds several at once) and for a stream (longest row unknown).
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
        exclude_defaults=True,  # else a later drawbar's new settings would be a change
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
        # compiled blocks take no more memory than uncompiled ones, and would be compiled anew for each size; two
        # micro-batches, because the second one runs while the gradients of the first are in memory
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
    """The most rows to try: a rank's share of the global batch; where rows are padded to the longest beside them, at
    most ``MICRO_BATCH_TOKENS`` tokens of them: in a larger micro-batch more is padding, which costs more than it gains.

    Args:
        longest: tokens of the longest row; None where rows have no tokens.
    """
    share = -(-loader.global_batch // loader.ranks.size)
    is_padded = config.data.batching == "padded" and config.data.padding_free is not True
    return share if longest is None or not is_padded else min(share, max(1, MICRO_BATCH_TOKENS // longest))


@dataclass(frozen=True)
class Trial:
    """The memory use of one trial step."""

    rows: int
    """Of a micro-batch."""
    resting: int
    """Bytes of weights, gradients and optimizer."""
    peak: int
    """Bytes."""


def largest_that_fits(measure: Callable[[int], Trial], fits: Callable[[float], bool], most: int) -> Trial:
    """The largest trial that fits, of 1, 2, 4, … or ``most`` rows; that of one row even if it does not fit.

    At each moment of a step, the memory is a constant plus a multiple of the rows. So the peak is convex in the
    rows: beyond the last two trials it may lie above the line through them, but by no more than the constants of two
    moments differ (a block that FSDP has gathered, a chunk of logits).

    Args:
        fits: whether the device of every rank has this many bytes to use.
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
    """``count`` rows with no fewer tokens than any others. For an encoder-decoder, up to twice as many rows: the sample
    with the longest input, and the one with the longest target, each ``count`` times."""
    if not isinstance(rows, SampleRows):
        longest_first = np.argsort(-rows.lengths[:], kind="stable")
        return raw_batch(rows, longest_first[np.arange(count) % len(rows)], epoch=0)
    fields = rows.samples.fields
    sides = [name for name in fields if name in ("input_ids", "decoder_input_ids")] or list(fields)
    longest = {int(rows.samples.field_lengths(name).argmax()) for name in sides}
    return raw_batch(rows, np.repeat(sorted(longest), count), epoch=0)
