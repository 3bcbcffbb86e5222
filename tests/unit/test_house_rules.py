"""Rules of the house that no linter knows: no strategy's or launcher's name in a comparison, no import circle, one door
to the files of pretrained models."""

import ast
from collections.abc import Iterator
from pathlib import Path

import drawbar
from drawbar.config.strategies import STRATEGIES

SOURCE = Path(drawbar.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
OWN_MODULES = (
    *("config/rules", "config/strategies", "deepspeed"),
    *("jobs/slurm", "jobs/ssh"),
)
"""Where a strategy or a launcher may be asked for by name: its own modules, and the tables of rules."""
STRATEGY_NAMES = set(STRATEGIES.names())
LAUNCHER_NAMES = {"slurm", "ssh", "local"}


def module_name(path: Path) -> str:
    parts = ["drawbar", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in FILES:
        if "templates" not in path.parts:
            yield path, ast.parse(path.read_text("utf-8"))


def constants(node: ast.expr) -> set[str]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_nothing_is_compared_with_a_strategys_or_a_launchers_name() -> None:
    found = []
    for path, tree in trees():
        if str(path.relative_to(SOURCE)).startswith(OWN_MODULES):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                named, text = constants(node), ast.unparse(node)
                if (named & STRATEGY_NAMES and "strategy" in text) or (named & LAUNCHER_NAMES and "launcher" in text):
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {text}")
    assert not found, "ask for a feature instead"


def imports(path: Path, tree: ast.Module, known: set[str]) -> set[str]:
    """The modules of drawbar that a module imports, inside its functions, too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found & known - {module_name(path)}


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = {module_name(path) for path in FILES}
    graph = {module_name(path): imports(path, tree, known) for path, tree in trees()}
    # a package's __init__ is not counted where one of its modules is meant
    graph = {name: {other for other in others if not name.startswith(f"{other}.")} for name, others in graph.items()}
    done: set[str] = set()

    def walk(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                walk(other, (*way, name))
            done.add(name)

    for name in sorted(graph):
        walk(name, ())


def test_pretrained_files_are_read_by_one_module() -> None:
    """It alone can refuse the code that comes with them: elsewhere, transformers would ask on standard input."""
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config", "trust_remote_code")
    ]
    door = "runtime/pretrained_files.py"
    assert door in {place.partition(":")[0] for place in found}
    assert not [place for place in found if not place.startswith(f"{door}:")], "call drawbar.runtime.pretrained_files"
