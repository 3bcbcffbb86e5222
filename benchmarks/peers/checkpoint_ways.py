"""Ways to save a run's model and optimizer, and to load them again: drawbar's, and those of W6's peers."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from drawbar.checkpoint.all_ranks import read_on_all_ranks
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.distributed.process_group import Distributed
from drawbar.engines.engine import Engine
from drawbar.engines.results import EngineState
from drawbar.train.checkpoint_layouts import CheckpointLayout, PartsLayout, WholeTensorsLayout
from drawbar.train.saver import AsyncWriter

DISK, MEMORY, PARTS, WHOLE = "the disk alone", "a copy in memory alone", "drawbar, parts", "drawbar, whole tensors"
ALONE = (DISK, MEMORY, PARTS, WHOLE, "torch.save", "safetensors", "torch DCP, async", "Trainer")
"""What one process can be asked for."""
TOGETHER = (DISK, MEMORY, PARTS, "torch DCP, async")
"""What several ranks with shards can be asked for."""
BACKGROUND = (PARTS, WHOLE, "torch DCP, async")
"""What lets training go on while it writes."""
_PIECE = 16 * 2**20


class Way(Protocol):
    """Every rank calls it."""

    def save(self, folder: Path) -> Callable[[], None]:
        """Returns when training may go on, and what then waits until the files are written."""

    def load(self, folder: Path) -> None:
        """Into the live model and optimizer."""


class OfDrawbar:
    """As the trainer saves; the files are on the disk, with checksums, before their folder has its name."""

    def __init__(self, engine: Engine, world: Distributed, layout: str) -> None:
        self._engine = engine
        self._world = world
        self._name = layout
        self._layout: CheckpointLayout | None = None
        self._writer = AsyncWriter()

    def save(self, folder: Path) -> Callable[[], None]:
        if self._layout is None:  # kept, as the trainer keeps it: with the memory of its last copy
            self._layout = self._layout_in(CheckpointDirectory(folder))
        write = self._layout.copy(1, {}, ensure_free_space=lambda size: None)
        if write is not None:
            self._writer.submit(write)
        return self._finish

    def _layout_in(self, directory: CheckpointDirectory) -> CheckpointLayout:
        layout = PartsLayout if self._name == "parts" else WholeTensorsLayout
        return layout(directory, self._engine, self._world)

    def _finish(self) -> None:
        self._writer.wait()
        error = self._writer.pop_error()
        if error is not None:
            raise error

    def load(self, folder: Path) -> None:
        with read_on_all_ranks(folder / "step-00000001", self._world) as found:
            self._engine.load(EngineState(found.model, found.optimizer, found.state["engine"]))


class OneFile:
    """Whole tensors by name, in one file, by one process."""

    def __init__(
        self, engine: Engine, save: Callable[[dict[str, Tensor], Path], None], load: Callable[[Path], dict[str, Tensor]]
    ) -> None:
        self._engine = engine
        self._write = save
        self._read = load

    def save(self, folder: Path) -> Callable[[], None]:
        folder.mkdir(parents=True)
        model = dict(self._engine.module.state_dict())
        self._write({**model, **dict(_moments(self._engine))}, folder / "state")
        return lambda: None

    def load(self, folder: Path) -> None:
        found = self._read(folder / "state")
        own = {**self._engine.module.state_dict(), **dict(_moments(self._engine))}
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(found[name])


class DistributedCheckpoint:
    """torch's distributed checkpoint: each rank writes its shards, in a thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._engine.module, _optimizer(self._engine))
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> Callable[[], None]:
        saving: Any = dcp.async_save(self._state(), checkpoint_id=folder)
        return lambda: saving.result()

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self._engine.module,
            _optimizer(self._engine),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class OfTrainer:
    """What transformers' Trainer writes when it saves: model, optimizer, schedule, random generators."""

    def __init__(self, engine: Engine) -> None:
        from transformers import Trainer, TrainingArguments

        self._arguments = partial(TrainingArguments, use_cpu=not torch.cuda.is_available(), report_to=[])
        self._trainer = partial(Trainer, model=engine.module, optimizers=(_optimizer(engine), None))

    def _open(self, folder: Path) -> Any:
        trainer: Any = self._trainer(args=self._arguments(output_dir=str(folder)))
        trainer.create_scheduler(10, trainer.optimizer)
        trainer.state.global_step = 1
        return trainer

    def save(self, folder: Path) -> Callable[[], None]:
        trainer = self._open(folder)
        trainer._save_checkpoint(trainer.model, trial=None)
        return lambda: None

    def load(self, folder: Path) -> None:
        trainer = self._open(folder)
        checkpoint = str(folder / "checkpoint-1")
        trainer._load_from_checkpoint(checkpoint)
        trainer._load_optimizer_and_scheduler(checkpoint)


class DiskAlone:
    """The same bytes written to the disk, from where they are, and nothing else: no format, no copy, no checksum."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._rank = rank

    def save(self, folder: Path) -> Callable[[], None]:
        folder.mkdir(parents=True, exist_ok=True)
        model = dict(self._engine.module.named_parameters())
        with (folder / f"bytes-{self._rank}").open("wb", buffering=0) as file:
            for tensor in ({**model, **dict(_moments(self._engine))}).values():
                content = memoryview(_local(tensor).detach().reshape(-1).view(torch.uint8).numpy())
                for begin in range(0, len(content), _PIECE):
                    os.write(file.fileno(), content[begin : begin + _PIECE])
            os.fsync(file.fileno())
        return lambda: None

    def load(self, folder: Path) -> None:
        room = bytearray(_PIECE)
        with (folder / f"bytes-{self._rank}").open("rb", buffering=0) as file:
            while file.readinto(room):
                pass


class MemoryAlone:
    """The same bytes copied to host memory that is ready, and nothing else: what a save in the background must wait
    for, at least."""

    def __init__(self, engine: Engine) -> None:
        live = {**dict(engine.module.named_parameters()), **dict(_moments(engine))}
        self._pairs = [
            (local := _local(tensor).detach(), torch.empty_like(local, device="cpu")) for tensor in live.values()
        ]

    def save(self, folder: Path) -> Callable[[], None]:
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in self._pairs:
            target.copy_(source)
        return lambda: None

    def load(self, folder: Path) -> None:
        for source, target in self._pairs:
            source.copy_(target)


def open_way(name: str, engine: Engine, world: Distributed) -> Way:
    """One of ``ALONE``, or, where there are several ranks, of ``TOGETHER``."""
    made: dict[str, Callable[[], Way]] = {
        DISK: lambda: DiskAlone(engine, world.rank),
        MEMORY: lambda: MemoryAlone(engine),
        PARTS: lambda: OfDrawbar(engine, world, "parts"),
        WHOLE: lambda: OfDrawbar(engine, world, "whole"),
        "torch.save": lambda: OneFile(engine, torch.save, torch.load),
        "safetensors": lambda: OneFile(engine, save_file, load_file),
        "torch DCP, async": lambda: DistributedCheckpoint(engine),
        "Trainer": lambda: OfTrainer(engine),
    }
    return made[name]()


def _optimizer(engine: Engine) -> Any:
    return engine.parts.state.optimizers[0]  # type: ignore[attr-defined]


def _moments(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    names: dict[nn.Parameter, str] = {parameter: name for name, parameter in engine.module.named_parameters()}
    for parameter, state in _optimizer(engine).state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                yield f"{names[parameter]}/{key}", value


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
