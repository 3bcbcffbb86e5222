"""A run of drawbar's, with an engine and data of a few numbers: the rest, from the command line down, is the source's.

The state after a step is a function of the samples of all steps so far: how often each was seen, and a number that
depends on their order. In stacks, this file is one of drawbar's.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from stand_ins import MODULES, AtOnce, Executor, Future, PerProcess, Token, module_changes, replaced, state_and_parent
from stand_ins import wait_for as wait_for_futures
from torch.distributed.elastic.multiprocessing import errors as torch_errors
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch_stand_in import DIST, Elastic, rendezvous_of, starter
from user_code import Fated, Notes
from world import current, world

import drawbar.cli as cli
from drawbar.checkpoint import format as checkpoint_format
from drawbar.checkpoint import space, write
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.config.parallel_dims import ParallelDims
from drawbar.config.schema.run_config import LaunchSection, LimitsSection
from drawbar.distributed import (
    background_messages,
    interrupt,
    liveness,
    process_group,
    pulse,
    rank_info,
    watchdog,
)
from drawbar.distributed.pulse import Collectives
from drawbar.distributed.watchdog import LAUNCHER, NODE
from drawbar.engines.local_shards import LocalShards
from drawbar.engines.results import EngineState, StepResult
from drawbar.launch import agent, autopsy, failures, observer
from drawbar.runtime import log
from drawbar.runtime.safetensors_reader import TensorBox
from drawbar.train import checkpoint_layouts, restore, run_dir_lock, rundir, saver, stop, synchronized_steps, trainer
from drawbar.train.callbacks import status
from drawbar.train.callbacks.save import SaveCallback
from drawbar.train.restore import restore_engine, restore_rest
from drawbar.train.run import Run
from drawbar.train.step import RunProgress
from drawbar.util import atomic_files, processes

STEPS, BATCH, EVERY, KEEP = 6, 12, 2, 2
SAMPLES = STEPS * BATCH
LIMITS = LimitsSection(start=30, save=30, callback=15)
TIMEOUT = 10
_MODULUS = 2**61 - 1


def state_after(step: int) -> tuple[list[int], int]:
    """How often each sample was seen, and the number that depends on their order."""
    number = 1
    for made in range(1, step + 1):
        number = mixed(number, sum(range((made - 1) * BATCH, made * BATCH)))
    return [1] * (step * BATCH) + [0] * (SAMPLES - step * BATCH), number


def mixed(number: int, batch: int) -> int:
    return (number * 1_000_003 + batch + 1) % _MODULUS


class Engine:
    """Trains on numbers."""

    cross_entropy, base, task = "exact", None, Fated()
    config = SimpleNamespace(parallel=SimpleNamespace(compile=False), optim=SimpleNamespace(name="sum"))
    meta_model = object()

    def __init__(self, world: Any) -> None:
        self.world = world
        self.step, self.total_steps = 0, STEPS
        self.seen = torch.zeros(SAMPLES, dtype=torch.int64)
        self.number = 1

    def train_step(self, micro_batches: list[Any], num_targets: float) -> StepResult:
        self.world.set_activity("forward")
        counts = torch.zeros(SAMPLES, dtype=torch.int64)
        for micro in micro_batches:
            self.task.forward(None, micro.batch)
            counts[micro.batch.ids] += 1
        self.world.set_activity("backward")
        DIST.all_reduce(counts)
        self.world.set_activity("optimizer")
        MODULES["time"].sleep(0.01)
        self.seen += counts
        self.number = mixed(self.number, int((counts * torch.arange(SAMPLES)).sum()))
        self.step += 1
        current().state["made"] = self.step
        one = torch.tensor(1.0)
        return StepResult(one, one, num_targets, 0.1, skipped=False, rejected=False, own_loss=one)

    def check_savable(self) -> None: ...

    def state(self) -> EngineState:
        return EngineState(
            {"seen": self.seen.clone()}, {"seen/number": torch.tensor([self.number])}, {"step": self.step}
        )

    def load(self, state: EngineState) -> None:
        self.seen, self.step = torch.clone(state.model["seen"]), state.values["step"]
        self.number = int(state.optimizer["seen/number"][0])
        world().on_load(self.step, self.seen.tolist(), self.number)  # type: ignore[attr-defined]

    def close(self) -> None: ...


class ShardCopier:
    """Each rank's share of the state."""

    def __init__(self, engine: Engine, world: Any) -> None:
        self._engine, self._world = engine, world

    def copy(self) -> LocalShards:
        engine, rank, share = self._engine, self._world.rank, SAMPLES // self._world.size
        model = [TensorBox("seen", (SAMPLES,), (rank * share,), engine.seen[rank * share :][:share].clone())]
        number = [TensorBox("seen/number", (1,), (0,), torch.tensor([engine.number]))]
        return LocalShards(model, number if rank == 0 else [], {}, {"step": engine.step})


class Loader:
    """Gives each rank its share of the samples of each step, in order."""

    tokens, waited = 0, 0.0

    def __init__(self, world: Any, task: Fated) -> None:
        self._world, self._task = world, task
        self._position = self._before = 0

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[Any]]]:
        for step in range(first + 1, last + 1):
            current().state["step"], self._before = step, self._position
            samples = list(range(self._position, self._position + BATCH))[self._world.rank :: self._world.size]
            batch = self._task.collate(samples)
            self._position += BATCH
            yield step, [SimpleNamespace(batch=batch, is_padding=False)]

    def undo_step(self) -> None:
        self._position = self._before

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def load(self, state: dict[str, Any]) -> None:
        self._position = self._before = state["position"]

    def close(self) -> None: ...


class Console:
    """drawbar's console: what it says goes to the trace."""

    def message(self, text: str) -> None:
        world().note(current().name, f"says: {text}")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class NoTrackers:
    def __init__(self, trackers: Any = ()) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def run_config(run_dir: Path, layout: str, on_error: str, restarts: int) -> Any:
    """A configuration: what the source reads of it."""
    return SimpleNamespace(
        run_dir=run_dir,
        run=SimpleNamespace(name=run_dir.name, seed=0),
        launch=LaunchSection(timeout=TIMEOUT, limits=LIMITS, restarts=restarts),
        checkpoint=SimpleNamespace(
            every=EVERY, keep=KEEP, keep_best=False, on_error=on_error, layout=layout, remote=None
        ),
        eval=SimpleNamespace(metric="loss", mode="min", every=None, patience=None),
        tracking=SimpleNamespace(log_every=1),
        train=SimpleNamespace(on_spike="warn", spike_threshold=10.0),
        optim=SimpleNamespace(muon_precision=None),
        data=SimpleNamespace(padding_free=False),
        parallel=SimpleNamespace(tensor=1, check_replicas=None),
        precision="fp32",
        device="cpu",
        model_dump=lambda mode: {},
    )


def prepare_run(request: Any, lock: Any, initial_model: Any, world: Any, stop: Any, console: Any, trackers: Any) -> Run:
    """The part of ``prepare.prepare_run`` that is about checkpoints and the run directory."""
    config = request.config
    start = world.from_rank0(partial(_find_start, config, lock), "looking for the newest checkpoint")
    engine, progress = Engine(world), RunProgress()
    loader = Loader(world, engine.task)
    if start.checkpoint is not None:
        start, rest = restore_engine(start, engine, world)
        progress = restore_rest(start, rest, 0, loader, None, world)
    world.barrier("loading the checkpoint")
    world.from_rank0(partial(_open_directory, config, start, lock), "opening the run directory")
    return Run(
        config, world, stop, console, trackers, engine.task, engine, loader, None, progress, STEPS, True, lock,
        partial(_make_run_dir, config), uncompiled_step_fits=False,
    )  # fmt: skip


def _find_start(config: Any, lock: Any) -> rundir.RunStart:
    lock.take_if_run()
    start = rundir._find_in_run(config, "auto")
    if start.refusal is not None:
        raise start.refusal
    world().on_start(-1 if start.checkpoint is None else int(start.checkpoint.name[5:]))  # type: ignore[attr-defined]
    return start


def _open_directory(config: Any, start: rundir.RunStart, lock: Any) -> None:
    checkpoints = CheckpointDirectory(config.run_dir / "checkpoints")
    checkpoints.set_aside(start.unusable)
    lock.take()
    rundir.write_config(config, start)
    checkpoints.remove_leftovers()


def _make_run_dir(config: Any, name: str) -> Path:
    folder: Path = config.run_dir.with_name(name)
    folder.mkdir(parents=True)
    rundir.write_config(SimpleNamespace(run_dir=folder), rundir.RunStart())
    return folder


def train_command() -> int:
    """``drawbar train``, in a rank or in a launcher."""
    config = world().config  # type: ignore[attr-defined]
    if current().rank is not None:
        training = trainer.Trainer.__new__(trainer.Trainer)
        training.config, training.callbacks, training._notes = config, [Notes()], ()
        training._request = SimpleNamespace(config=config)  # type: ignore[assignment]
        return training.fit().exit_code
    environ = current().environ
    nodes, nproc, number = (int(environ[name]) for name in ("nodes", "nproc", "number"))
    rendezvous = rendezvous_of(int(environ["node"]), nodes, number) if nodes > 1 else None
    if environ["launcher"] == "torchrun":
        return _torchrun(rendezvous or rendezvous_of(0, 1, number), nproc)
    return agent.run_processes(["train"], nproc, rendezvous, config.launch, run_dir=config.run_dir)


def _torchrun(rendezvous: Any, nproc: int) -> int:
    """torch's own launcher, which looks at no pulse."""

    def handle(number: int, frame: Any) -> None:
        raise SignalException("signal", sigval=signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        current().handlers[number] = handle
    with MODULES["tempfile"].TemporaryDirectory("torchrun-") as folder:
        config = agent._launch_config(rendezvous, nproc, TIMEOUT, folder)
        try:
            Elastic(config, "python")("train")
        except (torch_errors.ChildFailedError, SignalException, agent.RendezvousError):
            return 1
    return 0


def _become_launcher(nproc: int) -> None:
    current().environ[LAUNCHER] = str(current().pid)


def _begun_collectives(is_stuck: bool) -> Collectives:
    groups = world().network.groups  # type: ignore[attr-defined]
    return {
        key[2]: (group.counts[rank], "")
        for key, group in list(groups.items())
        for rank, member in enumerate(group.members)
        if member is current()
    }


def _node_name() -> str:
    return current().environ.get(NODE, current().node)


def _ignore(*arguments: Any, **options: Any) -> None: ...


class _Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if world().running is not None:
            world().note(current().name, f"logs: {record.getMessage()}")


_TRAINER = {
    "make_trackers": lambda config: (),
    "RankInfo": SimpleNamespace(from_environment=lambda: rank_info.RankInfo.from_environment(current().environ)),
    "ParallelDims": SimpleNamespace(of=lambda config, size: ParallelDims(dp_replicate=size)),
    "choose_device": lambda wanted, place: torch.device("cpu"),
    "make_console": lambda is_rank0: Console(),
    "InitialModel": lambda run_dir: nullcontext(),
    "Trackers": NoTrackers,
    "prepare_run": prepare_run,
    "own_callbacks": lambda run: [SaveCallback(run), *[status.StatusCallback(run)] * run.world.is_rank0],
    **dict.fromkeys(
        ("check_world", "ignore_output_errors", "start_logging", "warn_of_one_process", "check_allreduce",
         "warn_of_untested_versions", "finish_uploads"),
        _ignore,
    ),
}  # fmt: skip


def _changes() -> list[tuple[Any, str, Any]]:
    """Everything that is not the source's in a simulated run."""
    now = [(each, "time") for each in (observer, failures, autopsy, log, saver, background_messages, torch_errors)]
    changes = [change for module, names in now for change in module_changes(module, names)]
    for module, names in {
        agent: "os signal sys tempfile threading time",
        atomic_files: "os time secrets",
        background_messages: "threading",
        cli: "atexit click os signal sys threading time",
        failures: "os",
        interrupt: "os signal socket sys threading",
        liveness: "threading",
        log: "threading",
        observer: "os threading",
        process_group: "os sys threading",
        processes: "os",
        pulse: "os faulthandler threading",
        run_dir_lock: "fcntl os time uuid",
        rundir: "uuid",
        space: "os",
        status: "time",
        stop: "os signal threading time",
        watchdog: "os sys threading",
        write: "os time",
    }.items():
        changes += module_changes(module, names)
    lists = [
        (interrupt, "_listener"),
        (process_group, "_stores"),
        (process_group, "_retired_groups"),
        (pulse, "_opened"),
    ]
    changes += [(module, name, PerProcess()) for module, name in lists]
    changes += [(module, "dist", DIST) for module in (process_group, observer)]
    changes += [(module, "node_name", _node_name) for module in (process_group, agent)]
    changes += [(module, "has_launcher", lambda: True) for module in (process_group, stop)]
    changes += [(trainer, name, value) for name, value in _TRAINER.items()]
    return [
        *changes,
        (agent, "elastic_launch", Elastic),
        (agent, "subprocess_handler", starter),
        (agent, "become_launcher", _become_launcher),
        (agent, "logging", SimpleNamespace(disable=_ignore)),
        (observer, "state_and_parent", state_and_parent),
        (observer, "signal_main_thread", MODULES["os"].kill),
        (observer.WatchedRank.send, "__defaults__", (MODULES["os"].kill,)),
        (checkpoint_format, "version", lambda package: "0"),
        (liveness, "_begun_collectives", _begun_collectives),
        (run_dir_lock, "_TOKEN", Token()),
        (rundir, "check_same", lambda folder, config: ()),
        (rundir, "dump_yaml", lambda config: "simulated\n"),
        (rundir, "without_data_rebuild", lambda config: config),
        (saver, "ThreadPoolExecutor", Executor),
        (saver, "Future", Future),
        (saver, "wait_for", wait_for_futures),
        (write, "ThreadPoolExecutor", AtOnce),
        (checkpoint_layouts, "ShardCopier", ShardCopier),
        (checkpoint_layouts, "rng_state", lambda device: {}),
        (restore, "set_rng_state", _ignore),
        (restore, "seed_everything", _ignore),
        (synchronized_steps, "_COLLECTIVE_FILES", {"torch_stand_in.py"}),
        (cli, "group", SimpleNamespace(main=lambda **options: train_command())),
        (log.logger, "handlers", [_Log()]),
        (log.logger, "propagate", False),
    ]


def simulated() -> AbstractContextManager[None]:
    """Context in which drawbar runs on the simulated machines."""
    return replaced(_changes())


SHOWN = {
    str(Path(__file__).with_name("torch_stand_in.py")): f"{Path(torch.__file__).parent}{os.sep}distributed.py",
    __file__: f"{Path(cli.__file__).parents[1]}{os.sep}engines{os.sep}engine.py",
}
"""For stacks: a file of the simulation → the file that it stands for."""
