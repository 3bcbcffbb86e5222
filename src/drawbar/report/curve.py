"""``Curve``: a measured value by step, in a bounded number of points however long the run is."""

import math
from dataclasses import dataclass, field


@dataclass
class _Bucket:
    """The values of some consecutive steps: the smallest and the largest finite one, each with its step."""

    low: float = math.inf
    low_step: int = 0
    high: float = -math.inf
    high_step: int = 0
    gap: int | None = None
    """The first step whose value is not a finite number."""

    def merge(self, other: "_Bucket") -> None:
        if other.low < self.low:
            self.low, self.low_step = other.low, other.low_step
        if other.high > self.high:
            self.high, self.high_step = other.high, other.high_step
        self.gap = min((gap for gap in (self.gap, other.gap) if gap is not None), default=None)

    def points(self) -> list[tuple[int, float | None]]:
        found: dict[int, float | None] = {} if self.gap is None else {self.gap: None}
        if self.low <= self.high:
            found |= {self.low_step: self.low, self.high_step: self.high}
        return sorted(found.items(), key=lambda point: point[0])


@dataclass
class Curve:
    """One value by step. Of each bucket of steps the smallest and the largest value are kept, so that no spike is
    lost; a bucket is one step wide at first, and all become twice as wide whenever there are too many."""

    max_buckets: int = 500
    count: int = 0
    """Values so far."""
    first: float = math.nan
    last: float = math.nan
    not_finite: int = 0
    """How many values are not finite numbers."""
    _width: int = 1
    """Steps of a bucket."""
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    @property
    def is_thinned(self) -> bool:
        return self._width > 1

    @property
    def lowest(self) -> tuple[int, float] | None:
        """Step and value of the smallest finite value."""
        bucket = min(self._buckets.values(), key=lambda found: found.low, default=None)
        return None if bucket is None or bucket.low == math.inf else (bucket.low_step, bucket.low)

    @property
    def highest(self) -> tuple[int, float] | None:
        """Step and value of the largest finite value."""
        bucket = max(self._buckets.values(), key=lambda found: found.high, default=None)
        return None if bucket is None or bucket.high == -math.inf else (bucket.high_step, bucket.high)

    def add(self, step: int, value: float) -> None:
        """Add a value. Steps may come in any order, and more than once."""
        if self.count == 0:
            self.first = value
        self.count += 1
        self.last = value
        key = step // self._width
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
        elif bucket.low <= value <= bucket.high:  # most values of a long run: nothing to remember
            return
        if not math.isfinite(value):
            self.not_finite += 1
            bucket.gap = step if bucket.gap is None else bucket.gap
        else:
            if value < bucket.low:
                bucket.low, bucket.low_step = value, step
            if value > bucket.high:
                bucket.high, bucket.high_step = value, step
        while len(self._buckets) > self.max_buckets:
            self._widen()

    def _widen(self) -> None:
        self._width *= 2
        merged: dict[int, _Bucket] = {}
        for key, bucket in self._buckets.items():
            if key // 2 in merged:
                merged[key // 2].merge(bucket)
            else:
                merged[key // 2] = bucket
        self._buckets = merged

    def points(self) -> list[tuple[int, float | None]]:
        """Steps, ascending, with their values; None stands for a value that is not a finite number."""
        return [point for key in sorted(self._buckets) for point in self._buckets[key].points()]
