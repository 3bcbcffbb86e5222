"""What the test of turns runs in processes of their own."""

import time
from pathlib import Path

from benchmarks.common.turns import Turn


def work(log: str, name: str, steps: int) -> dict[str, float]:
    """Steps that write when they begin and end; after the third, one whose name is ``fails`` fails."""
    turn = Turn()
    turn.begin()
    for step in range(steps):
        _note(log, f"{name} begins {step}")
        time.sleep(0.01)
        if name == "fails" and step == 3:
            raise ValueError("no more")
        _note(log, f"{name} ends {step}")
        turn.step()
    return {"waited": turn.waited}


def _note(log: str, line: str) -> None:
    with Path(log).open("a") as file:
        file.write(line + "\n")
