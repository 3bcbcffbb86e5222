"""The planted faults of ``faults.yaml``, and how one is planted."""

from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
LIST = Path(__file__).with_name("faults.yaml")


class Stale(Exception):
    """The text that a fault replaces is not there, or not once: the code has moved."""


@dataclass(frozen=True)
class Fault:
    """See the top of ``faults.yaml``."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    mends: str = ""

    @property
    def area(self) -> str:
        return self.name.partition(":")[0]

    def planted(self, source: Path) -> str:
        """The text of the file below ``source``, with the fault in it. Raises Stale."""
        path = source / "drawbar" / self.file
        text = path.read_text("utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise Stale(f"{self.file} has its text {text.count(self.old)} times")
        return text.replace(self.old, self.new)


def all_faults() -> list[Fault]:
    return [Fault(**fields) for fields in YAML(typ="safe").load(LIST)]
