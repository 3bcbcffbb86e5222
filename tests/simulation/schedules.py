"""What happens in a simulated run: how many ranks it has, and which faults meet it when. A seed is a schedule."""

import errno
import math
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

PHASES = ("data", "forward", "callback", "callback", "save")
IN_A_PHASE = ("spin", "be deaf", "hold", "freeze", "raise", "exit", "crash", "one-sided")
"""Faults that a rank meets in the user's code."""
OF_A_RANK = ("stop", "kill", "signal a rank", "late messages", "slow disk", "disk error")
"""Faults that come to a rank at some moment, whatever it is doing."""
OF_A_NODE = ("signal the launcher", "signal the launcher", "kill the launcher", "kill a node", "stop the launcher")
OF_THE_RUN = ("delete", "begin again")
SIGNALS = (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LONGEST = 4.0
"""Seconds of a delay, or of a stop that is not for ever."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    kind: str
    who: int = 0
    """The rank, or the node."""
    at: float = 0.0
    """Seconds since the first command; for a fault in a phase, it is the step."""
    phase: str = ""
    seconds: float = math.inf
    """How long it lasts."""
    number: int = 0
    """A signal's number, or a disk error's."""

    def __str__(self) -> str:
        of_node = self.kind in OF_A_NODE
        whom = "" if self.kind in OF_THE_RUN else f" {'node' if of_node else 'rank'} {self.who}"
        when = f" in the {self.phase} of step {self.at:g}" if self.phase else f" at {self.at:g} s"
        lasting = f" for {self.seconds:g} s" if math.isfinite(self.seconds) else ""
        what = ""
        if self.number:
            what = f" ({errno.errorcode[self.number] if 'disk' in self.kind else signal.Signals(self.number).name})"
        return f"{self.kind}{what}{whom}{when}{lasting}"


@dataclass(frozen=True)
class Schedule:
    """A run, and its faults."""

    seed: int
    """Decides the order of what comes at the same time, and how long everything takes."""
    nodes: int = 1
    nproc: int = 2
    launcher: str = "drawbar"
    layout: str = "whole"
    on_error: str = "stop"
    restarts: int = 0
    faults: tuple[Fault, ...] = ()

    @property
    def ranks(self) -> int:
        return self.nodes * self.nproc

    def __str__(self) -> str:
        shape = f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.nproc} ranks, {self.launcher}, {self.layout}"
        what = "".join(f"\n  {fault}" for fault in self.faults) or "\n  nothing happens"
        return f"seed {self.seed}: {shape}, on_error {self.on_error}, {self.restarts} restarts{what}"


def schedule_of(seed: int) -> Schedule:
    """The schedule of a seed, with up to four faults."""
    chance = random.Random(seed)
    launcher = chance.choice(["drawbar"] * 3 + ["torchrun"])
    # torch's launcher waits for ever for a stopped rank, if its other ranks are all on another node
    nodes, nproc = chance.choice([(1, 2), (1, 2), (1, 3), *[(2, 1), (2, 2)] * (launcher == "drawbar")])
    schedule = Schedule(
        seed,
        nodes,
        nproc,
        launcher,
        layout=chance.choice(["whole", "parts"]),
        on_error=chance.choice(["stop", "stop", "warn"]),
        restarts=chance.choice([0, 0, 2]),
    )
    count = chance.choice([0, 1, 1, 1, 2, 2, 2, 3, 3, 4])
    return replace(schedule, faults=tuple(_fault(schedule, chance) for _ in range(count)))


def _fault(schedule: Schedule, chance: random.Random) -> Fault:
    kinds = chance.choice([IN_A_PHASE, IN_A_PHASE, OF_A_RANK, OF_A_RANK, OF_A_NODE, OF_THE_RUN])
    kind, rank = chance.choice(kinds), chance.randrange(schedule.ranks)
    at = round(chance.uniform(0.0, chance.choice([3.0, 3.0, 12.0])), 3)  # later, something hangs or starts again
    brief = round(chance.uniform(0.1, LONGEST), 2)
    if kinds is IN_A_PHASE:
        phase, step = chance.choice(PHASES), chance.randint(1, 6)
        return Fault(kind, rank, step + step % 2 if phase == "save" else step, phase)
    if kinds is OF_THE_RUN:
        return Fault(kind, 0, at)
    if kinds is OF_A_NODE:
        node = chance.randrange(schedule.nodes)
        number = chance.choice(SIGNALS) if "signal" in kind else 0
        return Fault(kind, node, at, "", brief if kind == "stop the launcher" else math.inf, number)
    number = {"signal a rank": chance.choice(SIGNALS), "disk error": chance.choice([errno.ENOSPC, errno.EIO])}.get(
        kind, 0
    )
    lasts = chance.random() < 0.5 if kind == "stop" else kind in ("late messages", "slow disk", "disk error")
    return Fault(kind, rank, at, "", brief if lasts else math.inf, number)


def simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are a little simpler than this one, the simplest first."""
    faults = schedule.faults
    for index in range(len(faults)):
        yield replace(schedule, faults=faults[:index] + faults[index + 1 :])
    for change in ({"restarts": 0}, {"on_error": "stop"}, {"layout": "whole"}, {"nodes": 1, "nproc": 2}, {"nproc": 1}):
        changed = replace(schedule, **change)  # type: ignore[arg-type]
        known = all(fault.who < (changed.nodes if fault.kind in OF_A_NODE else changed.ranks) for fault in faults)
        if changed != schedule and changed.ranks > 1 and known:
            yield changed
    for index, fault in enumerate(faults):
        for other in _simpler_faults(fault):
            if other != fault:
                yield replace(schedule, faults=(*faults[:index], other, *faults[index + 1 :]))


def _simpler_faults(fault: Fault) -> Iterator[Fault]:
    if not fault.phase:
        yield from (replace(fault, at=at) for digits in (0, 1, 2) if (at := round(fault.at, digits)) != fault.at)
    if math.isfinite(fault.seconds) and (seconds := float(round(fault.seconds)) or 1.0) != fault.seconds:
        yield replace(fault, seconds=seconds)
