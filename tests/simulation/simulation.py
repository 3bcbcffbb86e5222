"""Plays one schedule, and looks for whatever must not be: an endless wait, a lost step, a file of another run's."""

import math
import re
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import training
from disk import Room, watch_disk
from schedules import IN_A_PHASE, LONGEST, OF_A_NODE, OF_THE_RUN, Fault, Schedule
from stand_ins import folder_in_memory
from torch_stand_in import Network
from world import Process, worlds

import drawbar.cli as cli
from drawbar.checkpoint.format import RUN, Unusable
from drawbar.checkpoint.read import check_sizes, open_snapshot
from drawbar.train.rundir import run_id
from drawbar.util.run_dir import LOCK_FILE, checkpoint_folders

_GRACE = 30.0
"""How long torch's launcher waits for a rank that does not heed SIGTERM."""
_FENCE_SECONDS = 1.0
"""Between the last look at the lock and the rename of a checkpoint there is a moment; a slow disk makes it longer."""
_NAMED = re.compile(r"\brank (\d+)\b")
_RESCUED = re.compile(r"its state is saved as the run (\S+):")
_NO_RUN = "contains files, but no drawbar run"
_HANGS = ("spin", "be deaf", "hold", "freeze", "stop")
_HARMLESS = ("late messages", "slow disk", "stop the launcher")
"""What no run may fail of: it is shorter than every limit."""


def end_seconds(schedule: Schedule) -> float:
    """The longest time from the last fault to the end of a command, as the limits say: that of the rank at fault, which
    may be ten times what was seen; the wait for another node's verdict; torch's grace for the others; and a collective
    or heartbeat that the others give up."""
    limits = training.LIMITS
    limit = max(limits.start, limits.save, limits.callback, training.TIMEOUT, 10 * LONGEST)
    return limit + 2 * training.TIMEOUT + 10 + _GRACE + 20 + (300 if schedule.nodes > 1 else 0)


@dataclass
class Command:
    """One ``drawbar train``: a launcher on each node."""

    launchers: list[Process]
    began: float

    @property
    def code(self) -> int:
        """The exit code, the gravest of all nodes."""
        return max((launcher.end or 0 for launcher in self.launchers), key=abs)

    @property
    def said(self) -> str:
        return "".join(text for launcher in self.launchers for text in launcher.stderr)


@dataclass
class Outcome:
    """How a schedule ended."""

    problems: list[str]
    """What must not be; empty if all is well."""
    ending: str
    """How its first command ended."""
    is_mixed: bool
    """Whether two runs have written in the temporary folder of one checkpoint, which is known and not mended."""
    trace: list[tuple[float, str, str]]
    turns: int
    seconds: float
    """On the simulated clock."""


def play(schedule: Schedule, tracing: bool = False) -> Outcome:
    """Play a schedule to its end."""
    watch_disk()
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=folder_in_memory()))
    game = Game(schedule, folder, tracing)
    worlds.append(game)
    try:
        game.play()
        game.look_at_end()
    except Violation as found:
        game.problems.append(str(found))
    finally:
        game.close()
        worlds.pop()
        shutil.rmtree(folder, ignore_errors=True)
    game.problems += game.crashes
    return Outcome(game.problems, game.ending, bool(game.mixed), game.trace, game.turns, game.now)


class Violation(Exception):
    """What must not be, and ends a schedule."""


@dataclass
class Pending:
    """A fault that waits for its rank to come to a phase of a step."""

    fault: Fault
    is_met: bool = False


class Game(Room):
    """A world in which a run is trained until it is complete, whatever happens to it."""

    def __init__(self, schedule: Schedule, folder: Path, tracing: bool) -> None:
        super().__init__(schedule.seed, folder, training.SHOWN, tracing)
        self.schedule = schedule
        self.network = Network(self)
        self.run_dir = folder / "disk" / "runs" / "simulated"
        self.run_dir.parent.mkdir(parents=True)
        self.config = training.run_config(self.run_dir, schedule.layout, schedule.on_error, schedule.restarts)
        self.rank_main = cli.run
        self.problems: list[str] = []
        self.ending = ""
        self.commands: list[Command] = []
        self.fired: list[Fault] = []
        self.last_fault = 0.0
        self.saved = -1
        """The newest step that was saved since the directory was last begun."""
        self.taken_at = -math.inf
        """When the directory was last deleted."""
        self.pending = [Pending(fault) for fault in schedule.faults if fault.kind in IN_A_PHASE]

    # what the simulated processes tell

    def fate_in(self, process: Process, phase: str) -> Fault | None:
        """The fate of a rank in a phase of its step, which it meets once."""
        for pending in self.pending:
            fault = pending.fault
            here = process.rank, process.state.get("step"), phase
            if not pending.is_met and here == (fault.who, fault.at, fault.phase):
                pending.is_met = True
                self._note_fault(fault)
                return fault
        return None

    def on_start(self, step: int) -> None:
        if step < self.saved:
            raise Violation(f"a run starts from step {step}, and step {self.saved} was saved")

    def on_load(self, step: int, seen: list[int], number: int) -> None:
        if (seen, number) != training.state_after(step):
            self.problems.append(f"the state loaded at step {step} is not that of an uninterrupted run")

    def on_commit(self, process: Process, folder: Path) -> None:
        """A process has renamed a checkpoint."""
        if not folder.is_dir():
            return
        step, run_dir = int(folder.name[5:]), folder.parent.parent
        self.note(process.name, f"has saved step {step} in {run_dir.name}")
        try:
            check_sizes(folder)
        except Unusable as error:
            self.problems.append(f"step {step} is there, and not whole: {error}")
        if run_dir != self.run_dir:
            return
        process.state["saved"] = step
        holder = (run_dir / LOCK_FILE).read_text() if (run_dir / LOCK_FILE).exists() else ""
        if holder.startswith(f"process {process.pid} "):
            self.saved = max(self.saved, step)
        elif self.now - self.taken_at > _FENCE_SECONDS + LONGEST * self._has_fired("slow disk", "stop"):
            self.problems.append(f"{process.name} has saved step {step} in a directory that is not its own any more")

    # faults

    def _note_fault(self, fault: Fault) -> None:
        self.note("FAULT", str(fault))
        self.fired.append(fault)
        self.last_fault = max(self.last_fault, self.now + (fault.seconds if math.isfinite(fault.seconds) else 0.0))

    def _has_fired(self, *kinds: str) -> bool:
        return any(fault.kind in kinds for fault in self.fired)

    def _apply(self, fault: Fault) -> None:
        """Let a fault come now."""
        if fault.kind in OF_THE_RUN:
            self._note_fault(fault)
            self._delete_run()
            if fault.kind == "begin again":
                self.start_command()
            return
        victims = [
            process for process in self.processes.values() if process.end is None and self._is_meant(fault, process)
        ]
        if not victims:
            return
        self._note_fault(fault)
        victim = victims[-1]
        if fault.kind == "late messages":
            self.network.late[victim.name] = self.now + fault.seconds, fault.seconds
        elif fault.kind == "slow disk":
            self.disk_delays[fault.who] = fault.seconds
        elif fault.kind == "disk error":
            self.disk_errors[fault.who] = self.now + fault.seconds, fault.number
        elif fault.kind in ("stop", "stop the launcher"):
            victim.deliver(signal.SIGSTOP)
            if math.isfinite(fault.seconds):
                self.after(fault.seconds, victim.deliver, signal.SIGCONT)
        elif fault.kind == "kill a node":
            for process in list(self.processes.values()):
                if process.node == victim.node:
                    process.deliver(signal.SIGKILL)
        else:
            self.send(victim.pid, fault.number or signal.SIGKILL)

    def _is_meant(self, fault: Fault, process: Process) -> bool:
        if fault.kind in OF_A_NODE:
            return process.rank is None and process.environ["node"] == str(fault.who)
        return process.rank == fault.who

    def _delete_run(self) -> None:
        if self.run_dir.exists():
            self.run_dir.rename(trash := self.folder / f"trash-{len(self.trace)}")
            shutil.rmtree(trash)
        self.saved, self.taken_at = -1, self.now

    # commands

    def start_command(self) -> Command:
        number = len(self.commands)
        launchers = []
        for node in range(self.schedule.nodes):
            environ = {"node": str(node), "number": str(number), "nodes": str(self.schedule.nodes)}
            environ |= {"nproc": str(self.schedule.nproc), "launcher": self.schedule.launcher}
            name = f"launcher {number}" + (f" of node {node}" if self.schedule.nodes > 1 else "")
            launchers.append(Process(self, name, f"node-{'ab'[node]}", cli.run, environ))
        self.commands.append(Command(launchers, self.now))
        return self.commands[-1]

    def play(self) -> None:
        """Run the command again until the run is complete."""
        for fault in self.schedule.faults:
            if fault.kind not in IN_A_PHASE:
                self.after(fault.at, self._apply, fault)
        for _ in range(len(self.schedule.faults) + 2):
            first = self.start_command()
            self._wait_for_end()
            self.ending = self.ending or self._name_of_end(first)
            for command in self.commands[self.commands.index(first) :]:
                self._check_end(command)
            was_lost = self.taken_at > self.commands[-1].began
            if self.commands[-1].code == 0 and not (was_lost and not self.run_dir.exists()):
                return
            self.pass_time(self.last_fault + 1.0)  # a person waits until the disk is well again
            if self._has_fired(*OF_THE_RUN) and _NO_RUN in self._said(self.commands[-1]):
                self._delete_run()  # what a process has written there since makes it no run: a person looks at it
        raise Violation(f"the run does not end well: {self.commands[-1].said}")

    def _said(self, command: Command) -> str:
        """What the launchers of a command and their ranks have printed."""
        ranks = [process for process in self.processes.values() if process.parent in command.launchers]
        return command.said + "".join(text for rank in ranks for text in rank.stderr)

    def _latest_end(self) -> float:
        """When the newest command must have ended."""
        return max(self.last_fault, self.commands[-1].began) + end_seconds(self.schedule)

    def _wait_for_end(self) -> None:
        while not self.run(self._has_ended, until := self._latest_end()):
            if until < self._latest_end():
                continue  # another fault has come
            if self._nobody_waits():
                break
            left = [process.name for process in self.processes.values() if process.end is None]
            how = "nothing will ever happen" if self.is_deadlocked else "the command has not ended"
            raise Violation(f"{how} {self.now - self.last_fault:.0f} s after the last fault: {', '.join(left)}")
        for process in self.processes.values():  # what the scheduler does with a node
            process.deliver(signal.SIGKILL)

    def _nobody_waits(self) -> bool:
        """Whether something has happened to each rank that is left, and no launcher of drawbar's looks at them."""
        stuck = {fault.who for fault in self.fired if fault.kind in _HANGS}
        left = {process.rank for process in self.processes.values() if process.end is None} - {None}
        return self.schedule.launcher == "torchrun" and left <= stuck

    def _has_ended(self) -> bool:
        """Whether nothing runs any more but what only a kill can end and whose launcher is gone."""
        if any(launcher.end is None for launcher in self.commands[-1].launchers):
            return False
        for process in self.processes.values():
            if process.end is None:
                if process.rank is None or process.parent_pid != 1:
                    return False
                if not process.is_stopped and process.holder is None:
                    return False
        return True

    # what must not be

    def _name_of_end(self, command: Command) -> str:
        codes = {0: "complete", 1: "failed", 2: "refused", 75: "saved, asks to be started again", 130: "interrupted"}
        return codes.get(command.code, "launcher ended by a signal")

    def _check_end(self, command: Command) -> None:
        if self.schedule.launcher != "drawbar":
            return
        signals = {fault.number for fault in self.fired if "signal" in fault.kind}
        grave = [fault for fault in self.fired if fault.kind not in _HARMLESS and not self._is_brief(fault)]
        for launcher in command.launchers:
            code = launcher.end or 0
            is_allowed = {
                0: True,
                1: any(fault.kind != "signal the launcher" or self.schedule.nodes > 1 for fault in grave),
                2: self._has_fired(*OF_THE_RUN, "raise", "one-sided", "disk error"),  # in the first step of a process
                75: bool(signals & {signal.SIGTERM, signal.SIGUSR1}),
                130: signal.SIGINT in signals,
            }.get(code, self._has_fired("kill the launcher", "kill a node") or abs(code) % 128 in signals)
            if not is_allowed:
                self.problems.append(f"{launcher.name} ended with {code}: {command.said}")
            self._check_named(launcher)

    def _is_brief(self, fault: Fault) -> bool:
        return fault.kind == "stop" and math.isfinite(fault.seconds)

    def _check_named(self, launcher: Process) -> None:
        """If the message of a launcher names ranks, something has happened to one of them."""
        lost_nodes = ("kill a node", "kill the launcher", *["signal the launcher"] * (self.schedule.nodes > 1))
        if self._has_fired(*OF_THE_RUN, *lost_nodes, "stop the launcher", "one-sided"):
            return
        said = "".join(launcher.stderr)
        guilty = {fault.who for fault in self.fired if fault.kind not in OF_A_NODE}
        named = {int(rank) for rank in _NAMED.findall(said.partition("error: ")[2])}
        # in a save in parts, a rank may report the error of another one's disk
        is_vague = "a rank on another node" in said or (
            self.schedule.layout == "parts" and "could not be written" in said
        )
        if named and not named & guilty and not is_vague:
            self.problems.append(f"{launcher.name} names ranks that nothing has happened to: {said}")

    def look_at_end(self) -> None:
        """After the last command: the run is complete, and whole."""
        folders = checkpoint_folders(self.run_dir)
        if training.STEPS not in folders:
            raise Violation(f"the run is complete without its last step: {sorted(folders)}")
        for step, folder in folders.items():
            if folder.name in self.mixed:  # known: two runs have saved that step at the same time
                continue
            try:
                snapshot = open_snapshot(folder)
            except (Unusable, OSError) as error:
                raise Violation(f"the checkpoint of step {step} cannot be used: {error}") from error
            if snapshot.state[RUN] != run_id(self.run_dir):
                self.problems.append(f"the checkpoint of step {step} is another run's")
            state = torch.clone(snapshot.model["seen"]).tolist(), int(snapshot.optimizer["seen/number"][0])
            if state != training.state_after(step):
                self.problems.append(f"the state of step {step} is not that of an uninterrupted run")
        self._look_for_rescued()

    def _look_for_rescued(self) -> None:
        """A run whose directory was lost has saved its state where it says, if nothing else happened to it."""
        if not {fault.kind for fault in self.fired} <= {*OF_THE_RUN, *_HARMLESS}:
            return
        for process in self.processes.values():
            if process.rank == 0 and process.state.get("made", 0) > process.state.get("saved", 0):
                assert process.parent is not None
                for name in _RESCUED.findall("".join(process.parent.stderr)):
                    if not checkpoint_folders(self.run_dir.with_name(name)):
                        self.problems.append(f"there is no checkpoint in {name}, where the state is said to be")
