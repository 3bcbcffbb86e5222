"""The strategy of docs/extending.md, as a stranger would follow it: DDP whose gradients travel in fp16."""

import sys
from pathlib import Path

import pytest

import drawbar
from conftest import make_project
from docs.pages import blocks
from drawbar.config.strategies import find_strategy
from drawbar.errors import UserError
from harness import run_cli, run_ranks
from runs import fit_in, largest_difference, losses

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
ENTRY_POINT = "[drawbar.strategies]\ncompressed = compression:compressed\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    (source,) = (block.text for block in blocks(PAGE) if block.text.startswith("# compression.py"))
    (tmp_path / "compression.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("compression", None)


def train_both(folder: str) -> None:
    sys.path.insert(0, folder)
    for name in ("ddp", "compression:compressed"):
        fit_in(Path(folder), "train.steps=3", f"parallel.strategy={name}", f"run.name={name.partition(':')[0]}")


def test_it_trains(project: Path) -> None:
    run_ranks(train_both, 2, str(project))
    plain, compressed = (losses(project / "runs" / name) for name in ("ddp", "compression"))
    assert plain != compressed
    assert largest_difference(plain, compressed) < 1e-2


def test_an_installed_package_brings_one_by_an_entry_point(project: Path) -> None:
    folder = project / "compression-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: compression\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINT)
    assert find_strategy("compressed").name == "compressed"


def test_an_unknown_one_is_refused_with_what_there_is(project: Path) -> None:
    refused = run_cli("train", "config.yaml", "parallel.strategy=fspd", cwd=project)
    assert refused.code == 2
    assert "did you mean fsdp?" in refused.err
    refused = run_cli("train", "config.yaml", "parallel.strategy=compression:copressed", cwd=project)
    assert refused.code == 2
    assert "is not a strategy: the module has no 'copressed'; did you mean compression:compressed?" in refused.err
    with pytest.raises(UserError, match="'compression:build' is not a strategy, but of type function"):
        find_strategy("compression:build")


@pytest.mark.parametrize(
    ("code", "name", "what"),
    [
        ("raise KeyError('boom')", "own_bad:mine", "KeyError: 'boom'"),
        ("def mine(:", "own_bad:mine", "SyntaxError"),
        ("raise SystemExit(4)", "own_bad:mine", "ends the program when it is imported, with 4"),
        ("mine = 5", "bad_entry", "'bad_entry' is not a strategy, but of type int"),
        ("raise KeyError('boom')", "broken_entry", "cannot be imported: KeyError: 'boom'"),
    ],
)
def test_one_that_cannot_be_had_is_one_message(project: Path, code: str, name: str, what: str) -> None:
    (project / "own_bad.py").write_text(code + "\n")
    folder = project / "own_bad-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own_bad\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[drawbar.strategies]\n{name.partition(':')[0]} = own_bad:mine\n")
    with pytest.raises(UserError) as caught:
        drawbar.load_config(project / "config.yaml", [f"parallel.strategy={name}"])
    assert what in caught.value.what
    sys.modules.pop("own_bad", None)


def test_one_that_does_not_combine_is_refused_with_model_parallelism(project: Path) -> None:
    """It would average gradients over ranks that hold one model together."""
    refused = run_cli(
        "train", "config.yaml", "parallel.strategy=compression:compressed", "parallel.tensor=2", cwd=project
    )
    assert refused.code == 2
    assert "needs whole parameters" in refused.err
