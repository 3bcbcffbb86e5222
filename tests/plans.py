"""Plans of packed rows, as tests write and compare them."""

from collections.abc import Iterable, Sequence

import numpy as np

from drawbar.data.packing import Plan


def plan_of(rows: Iterable[Sequence[int]]) -> Plan:
    """The plan with these samples in its rows."""
    listed = [np.array(row, np.int64) for row in rows]
    return Plan(np.concatenate(listed), np.cumsum([len(row) for row in listed]))


def rows_of(plan: Plan) -> list[list[int]]:
    return [plan[row].tolist() for row in range(len(plan))]
