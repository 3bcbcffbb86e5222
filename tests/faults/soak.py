"""One long run under a supervisor, with seeded random faults, and ranks and strategy that change between its lives.

    python tests/faults/soak.py [--seed S] [--faults N] [--folder F]

The supervisor is a shell loop in a session of its own, which starts ``drawbar train`` again as soon as it has ended.
This process watches, sends the faults that come from outside, and looks for what was left running. At the end the run
must have the losses, weights and samples of one to which nothing happened: see :mod:`soak_plan`, :mod:`soak_oracle`.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_table import DOING, TIMEOUT, WITHOUT_LINE
from soak_plan import ALONE, GLOBAL_BATCH, Fault, Life, schedule
from soak_task import SOAK_TASK

from conftest import make_project

STEPS_PER_FAULT = 4
"""More than are made between two faults, on average."""
LINGER = 15
"""Seconds after a life in which its last process must be gone."""
SUPERVISOR = """
life=0
while true; do
    export SOAK_LIFE=$life
    date +%s.%N > lives/$life.began
    drawbar train config.yaml $(cat lives/$life.settings) > lives/$life.out 2> lives/$life.err
    code=$?
    echo $code $(date +%s.%N) $(ls -d runs/tiny/checkpoints/step-???????? 2> /dev/null | tail -n 1) > lives/ended
    mv lives/ended lives/$life.ended
    [ $code = 0 ] && break
    [ -e lives/$life.after ] && . lives/$life.after
    life=$((life + 1))
    [ -e lives/$life.settings ] || cp lives/last.settings lives/$life.settings
done
"""
SIGNALS = {"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}
"""Those that end a run in order, with its exit code."""
AGAIN = "starting the ranks again"


@dataclass
class Lived:
    """What has become of a life."""

    life: Life
    number: int
    began: float = 0.0
    ended: float = 0.0
    code: int = 0
    newest: int = 0
    """The step of the newest complete checkpoint at its end, before it was torn."""
    met: list[tuple[float, int]] = field(default_factory=list)
    """When each fault was met, and in which step."""
    over: list[float] = field(default_factory=list)
    """When the ranks had ended after each."""
    problems: list[str] = field(default_factory=list)
    err: str = ""


def settings(steps: int) -> list[str]:
    return [
        *("task.type=soaked:Soaked", "callbacks=[soaked:Diary]", f"train.steps={steps}"),
        *(
            f"train.global_batch={GLOBAL_BATCH}",
            "optim.schedule=constant",
            "optim.warmup=0",
            "optim.lr=1e-4",
            "eval.every=4",
        ),
        *("checkpoint.every=2", "checkpoint.keep=4", f"launch.timeout={TIMEOUT}"),
        *(f"launch.limits.{name}={TIMEOUT}" for name in ("callback", "save")),
        "launch.limits.start=60",
    ]


def make_soaked_project(folder: Path, lives: Sequence[Life], steps: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    project = make_project(folder)
    (project / "soaked.py").write_text(SOAK_TASK)
    (project / "supervisor.sh").write_text(SUPERVISOR)
    (project / "lives").mkdir()
    for number, life in enumerate(lives):
        life.write(project / "lives", number, settings(steps))
    (project / "lives" / "last.settings").write_text(" ".join([*settings(steps), *ALONE.settings()]))
    return project


class Lines:
    """The lines of a growing file of JSON."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Those that were completed since the last call."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if line.endswith(b"\n"):
                        self._read += len(line)
                        yield json.loads(line)


class Watch:
    """Follows the lives of the run, and sends the faults that come from outside."""

    def __init__(self, project: Path, supervisor: int) -> None:
        self.project, self._supervisor = project, supervisor
        self._notes = Lines(project / "notes.jsonl")
        self._looked = 0.0
        self.last_seen: dict[int, float] = {}
        """When a process of each life was last seen."""

    def follow(self, life: Life, number: int) -> Lived:
        """Watch a life to its end."""
        lived = Lived(life, number, began=float(self._wait_for(number, "began")))
        to_shoot = life.faults[-1] if life.faults and not life.faults[-1].phase else None
        self._pids: dict[int, int] = {}
        self._starts, self._begun, self._done = 0, 0, 0
        while not self._file(number, "ended").exists():
            self._read_notes(number)
            restarts = self._said(number).count(AGAIN)
            lived.over += [time.time()] * (restarts - len(lived.over))
            if to_shoot and restarts == len(life.planted) and self._is_due(to_shoot, restarts):
                time.sleep(to_shoot.delay)
                if self._shoot(to_shoot, lived):
                    to_shoot = None
            self.look_around()
            time.sleep(0.01)
        return self._end_of(lived)

    def _file(self, number: int, name: str) -> Path:
        return self.project / "lives" / f"{number}.{name}"

    def _said(self, number: int) -> str:
        path = self._file(number, "err")
        return path.read_text(errors="replace") if path.exists() else ""

    def _wait_for(self, number: int, name: str) -> str:
        while not (self._file(number, name).exists() and (text := self._file(number, name).read_text())):
            time.sleep(0.01)
        return text

    def _read_notes(self, number: int) -> None:
        for line in self._notes.new():
            if line["life"] != str(number):
                continue  # of a life whose processes have outlived it
            if "begun" in line:
                self._pids[line["rank"]] = line["pid"]
                if line["rank"] == 0:
                    self._starts += 1
                    self._begun = self._done = line["begun"]
            self._done = line.get("done", self._done)

    def _is_due(self, fault: Fault, restarts: int) -> bool:
        if fault.kind.endswith("starting"):
            return True
        if self._starts <= restarts or self._done < self._begun + fault.after:
            return False
        return not fault.kind.endswith("saving") or bool(list(self.project.glob("runs/tiny/checkpoints/*.tmp")))

    def _shoot(self, fault: Fault, lived: Lived) -> bool:
        """Send the signal. False if its process has not appeared yet."""
        name, _, to = fault.kind.partition(" to ")
        everybody = sorted(pid for pid, life in all_processes(self.project).items() if life == lived.number)
        launchers = [pid for pid in everybody if parent(pid) == self._supervisor]
        ranks = [self._pids[rank] for rank in sorted(self._pids)]
        if to == "a rank":
            targets = [self._pids[fault.who]] if fault.who in self._pids else []
        elif to == "the launcher":
            targets = launchers
        elif name == "SIGKILL":  # the launcher at last: the supervisor goes on as soon as it is gone
            targets = [pid for pid in everybody if pid not in launchers] + launchers
        else:
            targets = launchers + ranks
        if not launchers or not targets:
            return False
        lived.met.append((time.time(), self._done + 1))
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, name))
        return True

    def look_around(self) -> None:
        """Note of which lives there are processes."""
        if time.monotonic() > self._looked + 0.25:
            for number in set(all_processes(self.project).values()):
                self.last_seen[number] = time.time()
            self._looked = time.monotonic()

    def _end_of(self, lived: Lived) -> Lived:
        code, when, *newest = self._wait_for(lived.number, "ended").split()
        lived.code, lived.ended = int(code), float(when)
        lived.newest = int(newest[0].rsplit("-", 1)[1]) if newest else 0
        lived.over.append(lived.ended)
        lived.err = self._said(lived.number)
        planned = [(line["time"], line["step"]) for line in Lines(self._file(lived.number, "met")).new()]
        lived.met = planned + lived.met
        return lived


def all_processes(project: Path) -> dict[int, int]:
    """The life of every process of this soak that belongs to one, zombies not."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            variables = dict(variable.partition(b"=")[::2] for variable in path.read_bytes().split(b"\0"))
            if variables.get(b"SOAK_PROJECT") == os.fsencode(project) and b"SOAK_LIFE" in variables:
                found[int(path.parent.name)] = int(variables[b"SOAK_LIFE"])
    return found


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def problems_of(lived: Lived) -> Iterator[str]:
    """What is wrong with how a life ended, its messages above all."""
    faults = lived.life.faults
    if len(lived.met) < len(faults):
        yield f"it met {len(lived.met)} of {len(faults)} faults, and ended with code {lived.code}"
        return
    if "Traceback (most" in lived.err and not {"raise", "interrupt"} & {fault.kind for fault in faults}:
        yield "a traceback"  # of what a task raises, it is part of the message
    if lived.code != (wanted := exit_code_after(faults[-1] if faults else None, lived.life.layout.ranks)):
        yield f"exit code {lived.code} instead of {wanted}"
    if lived.life.layout.ranks > 1:
        parts = lived.err.split(AGAIN)
        if len(parts) != max(1, len(faults)):
            yield f"{len(parts)} starts for {len(faults)} faults"
        for fault, (_, step), part in zip(faults, lived.met, parts, strict=False):
            message = part[max(0, part.find("error: ")) :]
            yield from (
                f"the message lacks {pattern}" for pattern in said_of(fault, step) if not re.search(pattern, message)
            )


def exit_code_after(fault: Fault | None, ranks: int) -> int:
    """As the shell tells it: 128 and the number of the signal that killed the command."""
    if fault is None:
        return 0
    name, _, to = fault.kind.partition(" to ")
    if name in SIGNALS or fault.kind == "interrupt":
        return SIGNALS.get(name, 130)
    if to == "the launcher" or to.startswith("all") or (ranks == 1 and name in ("SIGKILL", "kill")):
        return 128 + signal.SIGKILL
    return 128 + signal.SIGSEGV if ranks == 1 and fault.kind == "crash" else 1


def said_of(fault: Fault, step: int) -> list[str]:
    """What the message must say of the rank at fault."""
    if not fault.phase:
        return [f"error: rank {fault.who} "] if fault.kind in ("SIGKILL to a rank", "SIGSTOP to a rank") else []
    doing = DOING.get(fault.phase, f".*{fault.phase}.*")
    where = r"\((step \d|making)" if fault.phase == "data" else rf"\(step {step}, {doing}\)"
    line = [] if fault.kind in WITHOUT_LINE else [r'soaked\.py("?, line |:)\d+']
    return [f"rank {fault.who} ", where, *line]


def run_soak(project: Path, lives: Sequence[Life]) -> list[Lived]:
    """Let the supervisor run, and follow it to the end of the run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started this one may have had it ignored
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "SOAK_PROJECT": str(project)}
    told: list[Lived] = []
    with subprocess.Popen(["sh", "supervisor.sh"], cwd=project, env=environment, start_new_session=True) as supervisor:
        watch = Watch(project, supervisor.pid)
        while not (told and told[-1].code == 0):
            number = len(told)
            lived = watch.follow(lives[number] if number < len(lives) else Life(ALONE, ()), number)
            lived.problems += problems_of(lived)
            told.append(lived)
            print(line_of(lived), flush=True)
    until = time.time() + LINGER
    while all_processes(project) and time.time() < until:
        watch.look_around()
        time.sleep(0.25)
    for lived in told:
        if (seconds := watch.last_seen.get(lived.number, 0) - lived.ended) > LINGER:
            lived.problems.append(f"life {lived.number}: a process still ran after {seconds:.0f} s")
    return told


def line_of(lived: Lived) -> str:
    what = ", ".join(
        f"{fault.kind}{f' in {fault.phase}' if fault.phase else ''} ({over - met[0]:.1f} s)"
        for fault, met, over in zip(lived.life.faults, lived.met, lived.over, strict=False)
    )
    told = f"{lived.number}: {lived.life.layout}: {what or 'nothing'}: step {lived.newest}, exit code {lived.code}"
    return "\n".join([told, *lived.problems, *([lived.err] if lived.problems else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where to keep the run; by default it is deleted")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report, problems = soak(asked.folder or Path(folder), asked.seed, asked.faults)
    print(report)
    print(*problems, sep="\n")
    sys.exit(bool(problems))


def soak(folder: Path, seed: int, faults: int) -> tuple[str, list[str]]:
    """Run the whole soak in a new folder. Returns its tables, and what does not hold."""
    from soak_oracle import compare  # it reads what is defined here
    from soak_tables import tables

    lives = list(schedule(seed, faults))
    steps = STEPS_PER_FAULT * faults
    project = make_soaked_project(folder, lives, steps)
    told = run_soak(project, lives)
    differences, problems = compare(project, told, settings(steps), steps)
    problems += [f"life {lived.number}: {problem}" for lived in told for problem in lived.problems]
    return tables(project, told, differences), problems


if __name__ == "__main__":
    main()
