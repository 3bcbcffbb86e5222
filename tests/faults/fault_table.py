"""Every fault in every phase of a step, on one rank, under every strategy: how the run ends, and that it can go on.

    python tests/faults/fault_table.py [--jobs N] [--only TEXT]

Each case is a run on two ranks in which one meets its fate at step 3. Its message must name that rank, the step, the
phase and the line; the run must end in time, leave no process and an autopsy; the same command must then end with the
weights of a run that nothing happened to.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import make_project
from harness import run_cli
from runs import losses, weights

TIMEOUT = 10
"""launch.timeout in seconds, the smallest that a configuration can ask for."""
STEPS, AT_STEP = 6, 3
TASK = '''
import ctypes, os, signal, time
import drawbar
from torch.optim.optimizer import register_optimizer_step_pre_hook

FAULT, PHASE, WHO = (os.environ.get(name) for name in ("FAULT", "PHASE", "WHO"))
TIMES = int(os.environ.get("TIMES", 1000))
made = 0


def meet(phase):
    """Meet the fate, if this is the phase, the step and the rank for it, and it was not met often enough."""
    if FAULT and phase == PHASE and made + 1 == 3 and os.environ["RANK"] == WHO:
        with open("met", "a+") as file:
            file.seek(0)
            if len(file.read()) == TIMES:
                return
            file.write("x")
        if not os.path.exists("fate"):
            with open("fate", "w") as file:
                file.write(repr(time.time()))
        fate()


def fate():
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "spin":
        while True:
            pass
    elif FAULT == "hold":  # the GIL
        ctypes.PyDLL(None).sleep(100000)
    elif FAULT == "crash":
        ctypes.string_at(0)
    elif FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "exit":
        os._exit(0)
    elif FAULT == "interrupt":
        raise KeyboardInterrupt
    elif FAULT == "raise":
        raise ValueError("planted")


class Fated(drawbar.CausalLM):
    def __init__(self, run_config):
        super().__init__(run_config)
        register_optimizer_step_pre_hook(lambda *arguments: meet("optimizer"))
        with open(f"process-{os.environ.get('RANK')}", "w") as file:
            file.write(str(os.getpid()))

    def collate(self, samples):
        meet("data")
        return super().collate(samples)

    def forward(self, model, batch):
        meet("forward" if model.training else "evaluation")
        return super().forward(model, batch)

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: meet("backward"))
        return loss


class Notes(drawbar.Callback):
    def on_train_start(self, run):
        global made
        made = run.step

    def on_step(self, run, info):
        global made
        meet("callback")
        made = info.step

    def on_save(self, run, checkpoint):
        meet("save")
'''
FAULTS = ("stop", "spin", "hold", "crash", "kill", "exit", "interrupt", "raise")
HANGS = FAULTS[:3]
WITHOUT_LINE = ("kill", "exit")
PHASES = ("data", "forward", "backward", "optimizer", "evaluation", "callback", "save")
STRATEGIES = ("ddp", "zero1", "fsdp", "tensor", "pipeline")
DOING = {
    "data": ".*",
    "forward": "forward.*",
    "backward": ".*backward",
    "evaluation": "evaluating.*",
    "save": ".*(save|saving).*",
}
"""What a rank says that it is doing in a phase, where that is not its name. The next batches are made beside a step;
under a pipeline, forward and backward are one."""


@dataclass(frozen=True)
class Case:
    """What happens, when, under which strategy, and to which rank."""

    fault: str
    phase: str
    strategy: str
    who: int

    def __str__(self) -> str:
        return f"{self.fault}, {self.phase}, {self.strategy}, rank {self.who}"


@dataclass(frozen=True)
class Ending:
    """How a case ended."""

    problems: list[str]
    """What does not hold; empty if all does."""
    seconds: float
    """From the fault to the end of the command."""
    message: str


def cases() -> list[Case]:
    """Every fault in every phase under ddp, on either rank; under the other strategies, those in collectives."""
    everywhere = [Case(fault, phase, "ddp", who) for fault in FAULTS for phase in PHASES for who in (1, 0)]
    others = [
        Case(fault, phase, strategy, 1)
        for strategy in STRATEGIES[1:]
        for fault in ("stop", "crash", "raise")
        for phase in ("forward", "backward", "optimizer", "evaluation")
        if strategy != "pipeline" or phase in ("backward", "optimizer")  # the task's forward is replayed there
    ]
    return everywhere + others


def make_fated_project(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    project = make_project(folder)
    (project / "fated.py").write_text(TASK)
    return project


def command(strategy: str) -> list[str]:
    parallel = {
        "tensor": "{tensor: 2}",
        "pipeline": "{pipeline: 2}",
    }.get(strategy, f"{{strategy: {strategy}}}")
    settings = [f"train.steps={STEPS}", f"eval.every={AT_STEP}", "checkpoint.every=1", "callbacks=[fated:Notes]"]
    limits = [f"launch.timeout={TIMEOUT}", f"launch.limits.callback={TIMEOUT}", "launch.nproc=2"]
    return ["train", "config.yaml", "task.type=fated:Fated", f"parallel={parallel}", *settings, *limits]


@cache
def uninterrupted(strategy: str) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """The losses and the last weights of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        project = make_fated_project(Path(folder))
        done = run_cli(*command(strategy), cwd=project)
        assert done.code == 0, done.err
        return losses(project / "runs" / "tiny"), weights(project / "runs" / "tiny", STEPS)


def end_of(case: Case, folder: Path) -> Ending:
    """Run a case in a new folder, and then the same command again."""
    project = make_fated_project(folder)
    fate = {"FAULT": case.fault, "PHASE": case.phase, "WHO": str(case.who)}
    done = run_cli(*command(case.strategy), cwd=project, env=fate)
    ended = time.time()
    if not (project / "fate").exists():
        return Ending(["it did not meet its fate"], 0.0, done.err)
    seconds = ended - float((project / "fate").read_text())
    message = done.err[max(0, done.err.find("error: ")) :]
    problems = [*wrong_with_end(case, done.code, message), *wrong_with_directory(project)]
    ends_at_once = case.fault not in HANGS and case.strategy == "ddp"  # else other ranks may wait in a collective
    if seconds > (10 if ends_at_once else TIMEOUT + 20):
        problems.append(f"it took {seconds:.0f} s to end")
    again = run_cli(*command(case.strategy), cwd=project)
    problems += wrong_with_resumed(case, project / "runs" / "tiny") if again.code == 0 else [again.err]
    return Ending(problems, seconds, message)


def wrong_with_end(case: Case, code: int, message: str) -> list[str]:
    doing = DOING.get(case.phase, f".*{case.phase}.*")
    wanted = [f"rank {case.who} ", r"\(step \d" if case.phase == "data" else rf"\(step {AT_STEP}, {doing}\)"]
    if case.fault not in WITHOUT_LINE:
        wanted.append(r'fated\.py("?, line |:)\d+')
    problems = [f"the message lacks {pattern}" for pattern in wanted if not re.search(pattern, message)]
    if code != (130 if case.fault == "interrupt" else 1):
        problems.append(f"exit code {code}")
    return problems


def wrong_with_directory(project: Path) -> Iterator[str]:
    for rank in range(2):
        pid = (project / f"process-{rank}").read_text()
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False).stdout
        if state.strip() and not state.startswith("Z"):
            yield f"rank {rank} still runs"
    if not (project / "runs" / "tiny" / "autopsy.md").exists():
        yield "there is no autopsy"


def wrong_with_resumed(case: Case, run: Path) -> Iterator[str]:
    """What differs from the run that nothing happened to."""
    whole_losses, whole_weights = uninterrupted(case.strategy)
    if losses(run) != whole_losses:
        yield "its losses differ from those of the run that nothing happened to"
    found = weights(run, STEPS)
    if not all(torch.equal(tensor, found[name]) for name, tensor in whole_weights.items()):
        yield "its weights differ from those of the run that nothing happened to"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="run the cases whose name has this text")
    asked = parser.parse_args()
    chosen = [case for case in cases() if asked.only in str(case)]
    found: dict[Case, Ending] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        endings = pool.map(lambda case: end_of(case, Path(folder) / str(case)), chosen)
        for case, ending in zip(chosen, endings, strict=True):
            found[case] = ending
            print(f"{case}: {ending.seconds:.1f} s{'; '.join(['', *ending.problems])}", flush=True)
            if ending.problems:
                print(ending.message)
    failed = [case for case, ending in found.items() if ending.problems]
    print(f"\n{table(found)}\n\n{len(chosen)} cases, {len(failed)} with a problem")
    sys.exit(bool(failed))


def table(found: dict[Case, Ending]) -> str:
    """The seconds to the end, rank by rank, as a table for ``docs/reliability.md``; or which rank had a problem."""
    lines = [f"| fault, strategy | {' | '.join(PHASES)} |", f"| --- |{' --- |' * len(PHASES)}"]
    for fault, strategy in dict.fromkeys((case.fault, case.strategy) for case in found):
        cells = [
            ", ".join(
                f"**rank {case.who}**" if ending.problems else f"{ending.seconds:.1f}"
                for case, ending in found.items()
                if (case.fault, case.strategy, case.phase) == (fault, strategy, phase)
            )
            for phase in PHASES
        ]
        lines.append(f"| {fault}, {strategy} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
