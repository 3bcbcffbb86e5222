"""``autopsy.md`` in the run directory: what every rank of a launcher was doing when the run ended abnormally."""

import time
from contextlib import suppress
from pathlib import Path

from drawbar.distributed.pulse import read_collectives
from drawbar.errors import visible
from drawbar.launch.observer import WatchedRank
from drawbar.util.atomic_files import replacing
from drawbar.util.run_dir import CONFIG_FILE, LOCK_FILE, newest_step

AUTOPSY_FILE = "autopsy.md"


def write_autopsy(run_dir: Path, message: str, ranks: list[WatchedRank], host: str, *, has_hung: bool) -> Path | None:
    """Write what is known of the ranks of this launcher. Returns the file; None without a directory of this run.

    Args:
        has_hung: whether the ranks have waited long enough for their collectives to be known.
    """
    if not _is_ours(run_dir, ranks):
        return None
    path = run_dir / AUTOPSY_FILE
    with suppress(OSError):
        with replacing(path, durable=False) as file:
            file.write(_text(run_dir, message, ranks, host, has_hung).encode())
        return path
    return None


def _is_ours(run_dir: Path, ranks: list[WatchedRank]) -> bool:
    """Whether a rank of this launcher, or one of another node, was the last to lock the directory."""
    with suppress(OSError):
        first_line = (run_dir / LOCK_FILE).read_text().partition("\n")[0]
        ours = {f"process {rank.pid}" for rank in ranks}
        has_rank0 = any(rank.rank == 0 for rank in ranks)
        return (run_dir / CONFIG_FILE).exists() and (not has_rank0 or first_line.partition(" on ")[0] in ours)
    return False


def _text(run_dir: Path, message: str, ranks: list[WatchedRank], host: str, has_hung: bool) -> str:
    step = newest_step(run_dir)
    resumes = f"resumes from the checkpoint of step {step}" if step >= 0 else "starts over: there is no checkpoint yet"
    parts = [
        f"# Why the run {run_dir.name} ended on {host}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"```text\n{visible(message)}\n```",
        f"The same command {resumes}.",
        "| rank | process | was doing | for | ended | collectives begun by its last heartbeat |\n"
        "| --- | --- | --- | --- | --- | --- |\n" + "\n".join(_row(rank) for rank in ranks),
        *(_unequal_collectives(ranks) if has_hung else []),
    ]
    for rank in ranks:
        parts.append(f"## Stacks of rank {rank.rank}\n\n```text\n{visible(rank.dumped().strip())}\n```")
    return "\n\n".join(parts) + "\n"


def _unequal_collectives(ranks: list[WatchedRank]) -> list[str]:
    """A sentence for each process group in which ranks have begun different numbers of collectives."""
    begun = {rank.rank: read_collectives(rank.file) for rank in ranks}
    found = []
    for group in sorted({group for groups in begun.values() for group in groups}):
        numbers = {rank: groups[group][0] for rank, groups in begun.items() if group in groups}
        behind = [str(rank) for rank, number in numbers.items() if number == min(numbers.values())]
        if len(behind) < len(numbers):
            first = min(numbers.values()) + 1
            found.append(f"Collective {first} of the group {group} was not begun by rank {', '.join(behind)}.")
    return found


def _row(rank: WatchedRank) -> str:
    begun = read_collectives(rank.file).items()
    counts = "; ".join(f"{group}: {number}{f', {newest}' * bool(newest)}" for group, (number, newest) in begun)
    doing, end = visible(str(rank.pulse)), rank.end or "ended by the launcher"
    cells = (rank.rank, rank.pid, doing, f"{rank.seconds:.0f} s", end, counts)
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
