"""The forecast of a run on given machines: what each kind of rank takes, and the run as a whole."""

import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.rules.rule_table import RULES, check_rules, check_world
from drawbar.config.schema.run_config import ParallelSection, RunConfig
from drawbar.config.strategies import AUTO
from drawbar.data.cache import is_cached
from drawbar.data.dataset import Sample
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.engines.build import choose_strategy
from drawbar.errors import ExitCode, UserError
from drawbar.parallel import context
from drawbar.parallel.precision import choose_dtypes
from drawbar.plan.fake_world import HOST, FakeWorld
from drawbar.plan.machine import Machine
from drawbar.plan.rank_forecast import RankForecast, forecast_rank, longest_sample
from drawbar.tasks.padding import choose_padding_free
from drawbar.tasks.task import Task, records_of
from drawbar.tasks.task_context import TaskContext
from drawbar.tasks.user_methods import make_task, name_failing_method
from drawbar.tracking.console import Console
from drawbar.train.batches import FIRST_RECORDS, encode_split, open_split, order_and_rows
from drawbar.train.memory_probe import Trial, largest_that_fits
from drawbar.train.setup import build_task, count_steps

T = TypeVar("T")


def in_own_process(function: Callable[[], T], what: str, timeout: float) -> T:
    """Run ``function`` in a fork of this process, and return its result, which must pickle.

    Args:
        what: what is forecast, for messages.
        timeout: longest wait for the result, in seconds.

    Raises:
        UserError: the function raised it; or it failed, or took too long.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(function, sender), daemon=True)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise _failed(what, f"gave no answer within {timeout:.0f} s")
        answer = receiver.recv()
    except EOFError as error:
        process.join()
        raise _failed(what, f"its process ended with exit code {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, UserError):
        raise answer
    if isinstance(answer, _Crash):
        raise _failed(what, answer.summary)
    return answer


class _Crash:
    """Replaces an exception in the fork that is not a UserError, and may not pickle."""

    def __init__(self, summary: str) -> None:
        self.summary = summary


def _run(function: Callable[[], Any], sender: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's warnings about missing ranks and devices
    try:
        answer = function()
    except UserError as error:
        answer = UserError(error.what, where=error.where, remedy=error.remedy, exit_code=error.exit_code)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        answer = _Crash(f"{type(error).__name__}: {error}".splitlines()[0][:300])
    sender.send(answer)
    sender.close()


def _failed(what: str, why: str) -> UserError:
    return UserError(
        f"{what} cannot be forecast: {why}",
        where="drawbar plan",
        remedy="try other settings of parallel; or measure it with a run of a few steps (train.steps=3)",
        exit_code=ExitCode.FAILED,
    )


COUNTED, ESTIMATED = "counted", "estimated from a similar configuration"
COPY_SPEED = 10e9
"""Bytes a second from a device to pinned memory of its host, as assumed: training waits for a checkpoint's copy."""
TIMEOUT_SECONDS = 600.0
_BUCKETS_BYTES = 2 * 4 * 500_000_000
"""Two DeepSpeed buckets of fp32 gradients, at its default size. They are no larger than all gradients."""


@dataclass(frozen=True)
class RunForecast:
    """What a configuration takes on given machines."""

    strategy: str
    """As a user writes it in ``--strategies``: ``fsdp tensor=2``; ``a change`` for one that is tried as a
    suggestion."""
    method: str
    """``COUNTED``; or ``ESTIMATED``, where this configuration cannot be run on fake tensors (see ``_countable``)."""
    ranks: list[RankForecast]
    """Of a pipeline, a rank for each coordinate along ``pp``; of ZeRO-1, the first and the last rank; else rank 0."""
    machine: Machine
    steps: int | None
    """Optimizer steps of the run; None if they depend on the length of the data, which is not known."""
    tokens: int
    """Tokens in a step if every sample is as long as the settings allow; 0 if samples have no tokens."""

    @property
    def largest(self) -> RankForecast:
        """The rank that takes most memory."""
        return max(self.ranks, key=lambda rank: rank.peak.bytes)

    @property
    def fits(self) -> bool:
        return self.largest.peak.bytes <= self.machine.usable

    @property
    def flops(self) -> float:
        """Operations in a step, on all ranks."""
        return sum(rank.flops for rank in self.ranks) / len(self.ranks) * self.machine.ranks

    @property
    def hours(self) -> float | None:
        """Hours that all steps take at the machine's ``utilization``; evaluations and starts are not counted."""
        if self.steps is None or self.machine.peak_flops is None:
            return None
        busiest = max(rank.flops for rank in self.ranks)
        return self.steps * busiest / (self.machine.peak_flops * self.machine.utilization) / 3600

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint of the whole run."""
        return self.ranks[0].checkpoint

    def as_dict(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "method": self.method,
            "fits": self.fits,
            "machine": asdict(self.machine),
            "usable": self.machine.usable,
            "peak": self.largest.peak.bytes,
            "steps": self.steps,
            "tokens_per_step": self.tokens,
            "flops_per_step": self.flops,
            "hours": self.hours,
            "checkpoint": self.checkpoint,
            "ranks": [asdict(rank) for rank in self.ranks],
        }


class Forecaster:
    """Forecasts variants of one run.

    Args:
        config: of the run; variants have the same task and data.
        task_type: its task's class.
        initial_model: see ``TaskContext``.

    Raises:
        UserError: the task cannot be built, or its first records cannot be read.
    """

    def __init__(self, config: RunConfig, task_type: type[Task], machine: Machine, initial_model: Path | None) -> None:
        self.machine = machine
        self._config = config
        self._task_type = task_type
        self._initial_model = initial_model
        alone = Distributed(RankInfo(), HOST, config.launch.timeout)
        self._task = build_task(task_type, config, alone, config.run_dir, initial_model=initial_model)
        with name_failing_method(self._task):
            records = records_of(self._task, "train")
            if not isinstance(records, Sequence):
                records = list(islice(records, FIRST_RECORDS))
        self._samples: dict[int, Sample] = {}
        self._records, self._alone = records, alone
        self._rows = self._count_rows(alone)

    def forecast(self, config: RunConfig, name: str, timeout: float = TIMEOUT_SECONDS) -> RunForecast:
        """What a variant takes. A run that itself searches for micro-batches that fit
        (``drawbar.train.memory_probe``) is forecast with the largest that fits, if its default one does not.

        Args:
            name: of the variant, for messages, and kept as ``RunForecast.strategy``.

        Raises:
            UserError: its settings do not combine, or do not fit the machines or the model.
        """
        usual = self._forecast(config, name, timeout)
        most = usual.largest.rows
        if usual.fits or most == 1 or not self._finds_micro_batch(config):
            return usual
        tried = {most: usual}

        def measure(rows: int) -> Trial:
            if rows not in tried:
                train = config.train.model_copy(update={"micro_batch": rows})
                tried[rows] = self._forecast(config.model_copy(update={"train": train}), name, timeout)
            found = tried[rows].largest
            # offloaded state takes none of the device's memory
            resting = 0 if config.parallel.offload else found.parameters + found.gradients + found.optimizer
            return Trial(rows, resting, found.peak.bytes)

        return tried[largest_that_fits(measure, lambda needed: needed <= self.machine.usable, most).rows]

    def _finds_micro_batch(self, config: RunConfig) -> bool:
        """Whether the run tries micro-batches before it trains (``drawbar.train.memory_probe``)."""
        train, parallel, on_gpu = config.train, config.parallel, self.machine.device == "cuda"
        is_set = train.micro_batch != "auto" or train.micro_batch_tokens is not None
        other = config.strategy.has_engine or parallel.features.many_devices or parallel.pipeline > 1
        return on_gpu and not (is_set or other or config.data.streaming)

    def _forecast(self, config: RunConfig, name: str, timeout: float) -> RunForecast:
        resolved = self.resolve(config)
        check_rules(_on_machine(resolved, self.machine), RULES)
        check_world(resolved, self.machine.ranks)
        if resolved.parallel.context > 1:  # what is counted below has no context parallelism
            task = self.make_task(resolved)
            context.check_context(torch.device(self.machine.device), task.label_placement)
            context.check_model(task.build_meta_model())
        counted, dims, estimated = _countable(resolved, self.machine.ranks)
        sample = self.sample_for(counted)
        devices_are_cpus = self.machine.device == "cpu"
        ranks = [
            in_own_process(
                partial(
                    forecast_rank,
                    self.make_task,
                    counted,
                    sample,
                    dims,
                    rank,
                    self.machine.ranks_per_node,
                    devices_are_cpus,
                ),
                f"rank {rank} of {name}",
                timeout,
            )
            for rank in _kinds_of_ranks(dims, counted)
        ]
        if estimated:
            ranks = [_with_zero_shares(rank, resolved, self.machine.ranks, not devices_are_cpus) for rank in ranks]
        length = self.make_task(resolved).row_length if "input_ids" in sample else 0
        method = ESTIMATED if estimated else COUNTED
        return RunForecast(name, method, ranks, self.machine, self._steps(config), config.train.global_batch * length)

    def sample_for(self, config: RunConfig) -> Sample:
        """The longest sample of a variant."""
        length = config.data.sequence_length
        if length not in self._samples:
            self._samples[length] = longest_sample(self.make_task(config), config, self._alone, self._records)
        return self._samples[length]

    def name_of(self, config: RunConfig) -> str:
        """How a user writes the configuration's own ``parallel``, with ``auto`` resolved."""
        parallel = self.resolve(config).parallel
        settings = parallel.model_dump(mode="json", exclude_defaults=True, exclude={"strategy", "compile"})
        written = (f"{name}={json.dumps(value)}".replace('"', "") for name, value in settings.items())
        return " ".join([parallel.strategy, *written])

    def resolve(self, config: RunConfig) -> RunConfig:
        """The configuration with dtypes, ``data.padding_free`` and strategy decided for the machines, and without
        compile. ``train.micro_batch: auto`` stays: ``rows_and_count`` chooses the rows, as a run does."""
        on_gpu = self.machine.device == "cuda"
        if on_gpu and config.precision == "auto":
            config = config.model_copy(update={"precision": "bf16"})
        if on_gpu and config.optim.muon_precision == "auto":
            config = config.model_copy(update={"optim": config.optim.model_copy(update={"muon_precision": "bf16"})})
        config = choose_dtypes(config, HOST)
        task = self.make_task(config)
        config = choose_padding_free(task, config, torch.device(self.machine.device))
        parallel = config.parallel
        if parallel.strategy == AUTO:
            dims = ParallelDims.of(parallel, self.machine.ranks)
            world = FakeWorld(0, dims, self.machine.ranks_per_node)
            strategy, _ = choose_strategy(task, config, world, self.machine.memory)
            parallel = parallel.model_copy(update={"strategy": strategy})
        # a compiled block takes no more than an uncompiled one; a run tries uncompiled steps, too
        return config.model_copy(update={"parallel": parallel.model_copy(update={"compile": False})})

    def make_task(self, config: RunConfig) -> Task:
        """The task without weights."""
        known = (self._task.tokenizer, self._task.dataset_metadata)
        return make_task(
            self._task_type, TaskContext(config, *known, weightless=True, initial_model=self._initial_model)
        )

    def _count_rows(self, alone: Distributed) -> int | None:
        """Rows of the training data; None if they are not known without encoding them, or do not matter."""
        config = self._config
        if config.train.steps is not None or config.data.streaming:
            return None
        opened = open_split(self._task, "train", config, alone)
        if opened.cache_inputs is None or not is_cached(config.cache_dir, "train", opened.cache_inputs):
            return None
        split = encode_split(self._task, opened, config, alone, Console())
        return len(order_and_rows(self._task, split, config)[1])

    def _steps(self, config: RunConfig) -> int | None:
        if config.train.steps is None and self._rows is None:
            return None
        per_epoch = None if self._rows is None else math.ceil(self._rows / config.train.global_batch)
        return count_steps(config.train, per_epoch)


def _on_machine(config: RunConfig, machine: Machine) -> RunConfig:
    """The configuration as the rules should judge it: with the processes and the device of the planned machines."""
    launch = config.launch.model_copy(update={"nproc": machine.ranks})
    return config.model_copy(update={"launch": launch, "device": machine.device})


def _kinds_of_ranks(dims: ParallelDims, config: RunConfig) -> list[int]:
    """One rank of each kind; the other ranks of its kind hold and do the same. The stages of a pipeline differ: `1f1b`
    keeps more micro-batches in the first."""
    if dims.pp > 1:
        return [stage * (dims.size // dims.pp) for stage in range(dims.pp)]
    # only ZeRO-1 (of drawbar's strategies of several processes) lacks this feature: it distributes whole parameters
    uneven = dims.size > 1 and not config.parallel.features.supports_model_parallel
    return [0, dims.size - 1] if uneven else [0]


def _countable(config: RunConfig, ranks: int) -> tuple[RunConfig, ParallelDims, bool]:
    """The nearest configuration whose steps can be made on fake tensors, its degrees, and whether it differs
    from ``config``.

    DeepSpeed cannot compute on fake tensors: the run counts as DDP, and ``_with_zero_shares`` then divides its state.
    Fake tensors are the CPU's, for which there is no ring attention: the ranks that share a sequence count as
    data-parallel ranks, each with a sequence as long as its share. ``nn.DataParallel`` counts as one device; fp8 is
    left out.
    """
    parallel, estimated = config.parallel, False
    if config.strategy.has_engine:
        kept = {
            name: getattr(parallel, name) for name in ("tensor", "pipeline", "activation_checkpointing", "schedule")
        }
        strategy = "single" if ranks == 1 else "ddp"
        parallel, estimated = ParallelSection(strategy=strategy, **kept), True
    if parallel.features.many_devices:
        parallel, estimated = ParallelSection(strategy="single"), True
    if parallel.fp8 is not None:
        parallel, estimated = parallel.model_copy(update={"fp8": None}), True
    data = config.data
    if parallel.context > 1:
        length = -(-data.sequence_length // parallel.context)
        train = config.train.model_copy(update={"global_batch": config.train.global_batch * parallel.context})
        config = config.model_copy(update={"train": train})
        data = data.model_copy(update={"sequence_length": length})
        parallel, estimated = parallel.model_copy(update={"context": 1}), True
    counted = config.with_parallel(parallel).model_copy(update={"data": data})
    return counted, ParallelDims.of(parallel, ranks), estimated


def _with_zero_shares(rank: RankForecast, config: RunConfig, ranks: int, on_gpu: bool) -> RankForecast:
    """What DeepSpeed leaves a rank of the parameters, gradients and optimizer state of a replica (Rajbhandari et al.
    2020, arXiv:1910.02054): stage 1 divides the optimizer state by the data-parallel ranks, stage 2 also gradients,
    stage 3 also parameters, of which it gathers a part; gradients have a buffer for what is being sent. What
    is offloaded is not in the device's peak: parameters, or the optimizer's state and, from stage 2 on, gradients."""
    if not config.strategy.zero_stages:
        return rank
    from drawbar.deepspeed.settings import NOWHERE, offload_optimizer, offload_parameters, zero_stage  # a guest

    stage, data = zero_stage(config), ranks // config.parallel.model_ranks
    kept = rank.peak.by_kind
    share: dict[str, Any] = {
        "optimizer": rank.optimizer // (data if stage >= 1 else 1),
        "gradients": rank.gradients // (data if stage >= 2 else 1),
        "parameters": rank.parameters // (data if stage >= 3 else 1),
    }
    # the peak that was counted has a replica's whole state, in whose place the shares are put
    buckets = min(rank.gradients, _BUCKETS_BYTES) if stage >= 1 else 0
    by_kind = {**kept, **share, "communication": kept["communication"] + buckets}
    if on_gpu and offload_optimizer(config) != NOWHERE:
        by_kind |= {"optimizer": 0} | ({"gradients": 0} if stage >= 2 else {})
    if on_gpu and offload_parameters(config) != NOWHERE:
        by_kind["parameters"] = 0
    peak = replace(rank.peak, bytes=sum(by_kind.values()), by_kind=by_kind)
    return replace(rank, **share, peak=peak)
