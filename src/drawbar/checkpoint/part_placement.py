"""``PartPlacement``: where nodes share no disk, which disk gets which parts of a checkpoint."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drawbar.checkpoint.part_record import PartRecord


@dataclass(frozen=True)
class PartPlacement:
    """Each disk gets the parts of its own ranks, and copies of those of the ``copies - 1`` disks before it, in a ring.

    So any ``copies - 1`` disks may be lost.
    """

    ranks: Sequence[Sequence[int]]
    """For each disk, the ranks that write to it."""
    copies: int
    """On how many disks each part is, at most the number of disks."""

    def disk_of(self, rank: int) -> int:
        return next(disk for disk, ranks in enumerate(self.ranks) if rank in ranks)

    def next_disks(self, disk: int) -> list[int]:
        """The disks that get copies of the parts of this one."""
        return [(disk + shift) % len(self.ranks) for shift in range(1, self.copies)]

    def ranks_on(self, disk: int) -> list[int]:
        """The ranks whose parts this disk has, copies included."""
        disks = [(disk - shift) % len(self.ranks) for shift in range(self.copies)]
        return [rank for each in disks for rank in self.ranks[each]]

    def names_by_disk(self, records: Iterable[PartRecord]) -> list[list[str]]:
        """The names of the part files on each disk, for the manifest."""
        names = {record.rank: [file.name for file in record.files] for record in records}
        disks = range(len(self.ranks))
        return [sorted(name for rank in self.ranks_on(disk) for name in names[rank]) for disk in disks]
