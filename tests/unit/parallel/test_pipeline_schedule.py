"""The instructions of a pipeline's step are complete, let no rank wait for ever, and take the time that the papers
give."""

from collections import Counter, defaultdict, deque
from itertools import product

import pytest

from drawbar.parallel.pipeline.schedule import Action, Instruction, Receive, Send, actions_of, instructions_of

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
LAYOUTS = list(product(CHUNKS, range(2, 7), range(1, 15)))
"""Schedules, ranks, micro-batches."""


def steps_of(schedule: str, ranks: int, count: int) -> list[tuple[Instruction, ...]]:
    return [instructions_of(schedule, rank, ranks, CHUNKS[schedule], count) for rank in range(ranks)]


def execute(steps: list[tuple[Instruction, ...]], stages: int) -> list[Instruction]:
    """What was executed, with messages as NCCL sends them: on each rank those of a group one after another, a send ends
    when the other rank receives, and messages to higher and to lower ranks have groups of their own."""
    ranks = len(steps)
    todo = [deque(step) for step in steps]
    messages: dict[tuple[int, bool], deque[Instruction]] = defaultdict(deque)  # by rank, and whether to a higher one
    arrived: set[tuple[int, Action]] = set()
    executed: list[Instruction] = []

    def ends_of(message: Instruction) -> tuple[int, int]:
        assert isinstance(message, Receive | Send)
        taker = message.result_of.feeds(stages)
        assert taker is not None
        return message.result_of.stage % ranks, taker.stage % ranks

    progress = True
    while progress:
        progress = False
        for rank, rest in enumerate(todo):
            while rest:
                instruction = rest[0]
                if not isinstance(instruction, Action):
                    source, destination = ends_of(instruction)
                    stream = messages[rank, source < destination]
                    if not (stream and stream[-1] is instruction) and (rank, instruction.result_of) not in arrived:
                        stream.append(instruction)
                    if isinstance(instruction, Receive) and (rank, instruction.result_of) not in arrived:
                        break
                executed.append(rest.popleft())
                progress = True
        for rank, up in list(messages):
            stream = messages[rank, up]
            if stream and isinstance(stream[0], Send):
                _, destination = ends_of(stream[0])
                other = messages[destination, up]
                if other and other[0] == Receive(stream[0].result_of):
                    arrived.add((destination, stream[0].result_of))
                    stream.popleft()
                    other.popleft()
                    progress = True
    return executed


@pytest.mark.parametrize(("schedule", "ranks", "count"), LAYOUTS)
def test_every_rank_comes_to_its_end(schedule: str, ranks: int, count: int) -> None:
    stages = ranks * CHUNKS[schedule]
    steps = steps_of(schedule, ranks, count)
    executed = execute(steps, stages)
    assert Counter(executed) == Counter(instruction for step in steps for instruction in step)
    wanted = [Action(*each) for each in product(range(stages), range(count), (False, True))]
    actions = [instruction for instruction in executed if isinstance(instruction, Action)]
    assert Counter(actions) == Counter(wanted)
    sums = [(action.stage, action.micro_batch) for action in actions if action.is_backward]
    for stage in range(stages):  # the order in which gradients add up
        assert [number for each, number in sums if each == stage] == list(range(count))


def slots_of(schedule: str, ranks: int, count: int) -> int:
    """How long a step takes where each action takes one slot, and messages take no time."""
    chunks = CHUNKS[schedule]
    todo = [deque(actions_of(schedule, rank, ranks, chunks, count)) for rank in range(ranks)]
    done: set[Action] = set()
    slots = 0
    while any(todo):
        ready = [rest for rest in todo if rest and rest[0].needs(ranks * chunks) in {None, *done}]
        done.update([rest.popleft() for rest in ready])
        slots += 1
    return slots


@pytest.mark.parametrize(("schedule", "ranks", "count"), [each for each in LAYOUTS if each[2] % each[1] == 0])
def test_ranks_wait_no_longer_than_the_papers_say(schedule: str, ranks: int, count: int) -> None:
    """2·(P − 1) slots a rank: of an interleaved schedule, slots are half as long."""
    assert slots_of(schedule, ranks, count) == 2 * (count * CHUNKS[schedule] + ranks - 1)


@pytest.mark.parametrize(("ranks", "count"), [(2, 9), (4, 3), (4, 12)])
def test_1f1b_keeps_the_activations_of_as_many_micro_batches_as_stages_follow(ranks: int, count: int) -> None:
    for rank in range(ranks):
        held, most = 0, 0
        for action in actions_of("1f1b", rank, ranks, 1, count):
            held += -1 if action.is_backward else 1
            most = max(most, held)
        assert most == min(count, ranks - rank)
