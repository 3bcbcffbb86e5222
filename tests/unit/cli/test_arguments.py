"""From a command line to a configuration, a number of processes and an exit code."""

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch

import drawbar
from drawbar.cli import group
from drawbar.cli.arguments import load, load_run, user_program
from drawbar.cli.train import count_processes, rerun_command
from drawbar.config.io.compare import check_same
from drawbar.config.schema.run_config import CausalLMConfig
from drawbar.errors import UserError
from drawbar.tasks.causal_lm import CausalLM
from drawbar.util.run_dir import LOCK_FILE
from harness import run_cli, run_ranks
from messages import check_one_message
from runs import losses


class Shouting(CausalLM):
    """A user's own task, with an option of its own."""

    class Config(CausalLMConfig):
        loudness: int = 1
        """How loud."""

    def encode(self, record: dict, train: bool) -> list | None:
        return super().encode({"text": record["text"].upper() + "!" * self.config.loudness}, train)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_first_argument_is_a_file_unless_it_is_an_override(project: Path) -> None:
    path = str(project / "config.yaml")
    assert load((path, "optim.lr=0.5"), None).config.optim.lr == 0.5
    assert load((path,), None).config.run.name == "tiny"
    assert load(("optim.lr=0.5",), None).config.run.name == "run"
    assert load((), None).config.model_dump() == drawbar.RunConfig().model_dump()
    with pytest.raises(UserError, match=r"missing\.yaml"):
        load(("missing.yaml",), None)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--gradient_accumulation_steps 4", "Did you mean train.global_batch?"),
        ("--learning_rate=1e-4", "Did you mean optim.lr?"),
        ("--per-device-train-batch-size 8", "Did you mean train.micro_batch?"),
        ("--bf16", "Did you mean precision=bf16?"),
        ("--lr 1e-4", "Settings are written KEY=VALUE: optim.lr=1e-4\n"),
        ("--train.steps 10", "Settings are written KEY=VALUE: train.steps=10\n"),
        ("--train.steps=10 --fork new", "Settings are written KEY=VALUE: train.steps=10\n"),
        ("--train.global-batch run.name=a", "Settings are written KEY=VALUE: train.global_batch=VALUE\n"),
        ("--train.step 10", "Did you mean train.steps or launch.limits.step?"),
    ],
)
def test_a_setting_written_as_an_option_is_named(
    words: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hint in explain_refused_option(words, monkeypatch, capsys)


def test_other_options_that_there_are_not_are_left_to_click(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("--frk new", "--nonsense_of_mine 3", "-x"):
        assert "KEY=VALUE" not in explain_refused_option(words, monkeypatch, capsys).partition("Error: ")[2]


def explain_refused_option(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of words behind ``drawbar train c.yaml``."""
    monkeypatch.setattr(sys, "argv", ["drawbar", "train", "c.yaml", *words.split()])
    with pytest.raises(SystemExit) as caught:
        drawbar.cli.run()
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_task_brings_its_own_options(project: Path) -> None:
    loaded = load((str(project / "config.yaml"), "task.loudness=3"), Shouting)
    assert loaded.config.task.loudness == 3
    with pytest.raises(UserError, match="loudness"):
        load((str(project / "config.yaml"), "task.loudness=3"), None)


def test_a_run_is_read_where_it_lies_now(project: Path) -> None:
    moved = project / "else: where" / "moved"
    moved.mkdir(parents=True)
    (moved / "config.yaml").write_text((project / "config.yaml").read_text())
    (moved / LOCK_FILE).touch()
    loaded = load_run(str(moved), ("eval.micro_batch=3",), None)
    assert loaded.config.run_dir == moved
    assert loaded.config.eval.micro_batch == 3


@pytest.mark.parametrize(
    "left", [b"", b"run: {name: tiny}\ntrain: {ste", b"run: {name\n", b"\0" * 9 + b"\n", b"\xff\n"]
)
def test_a_damaged_config_of_a_run_is_no_mistake_of_the_user(left: bytes, project: Path) -> None:
    config = load((str(project / "config.yaml"), f"run.dir={project}"), None).config
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").write_bytes(left)
    (config.run_dir / LOCK_FILE).touch()
    for read in (lambda: load_run(str(config.run_dir), (), None), lambda: check_same(config.run_dir, config)):
        with pytest.raises(UserError, match=r"own config.yaml is damaged: [\s\S]*restore it from a copy") as damaged:
            read()
        assert damaged.value.where == str(config.run_dir / "config.yaml")


def test_a_run_misspelt(project: Path) -> None:
    run = project / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    (run / LOCK_FILE).touch()
    with pytest.raises(UserError, match="not a run directory") as wrong:
        load_run(str(project / "runs" / "tniy"), (), None)
    assert str(run) in str(wrong.value.remedy)
    with pytest.raises(UserError, match="not a run directory"):
        load_run(str(project / "nowhere" / "tiny"), (), None)


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        (("launch.nproc=3",), 3),
        (("launch.nproc=1",), 1),
        (("device=cpu",), 1),
        (("parallel.strategy=single",), 1),
        (("parallel.strategy=dp",), 1),
        ((), 8),
    ],
)
def test_how_many_processes(settings: tuple[str, ...], processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = load(settings, None).config
    assert count_processes(config) == processes
    monkeypatch.setenv("RANK", "0")  # torchrun has started them already
    assert count_processes(config) == 1


def test_the_command_that_ranks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").touch()
    monkeypatch.setattr(sys, "argv", ["my_task.py", "train", "config.yaml"])
    assert rerun_command(None) == ["-P", "-m", "drawbar", "train", "config.yaml"]
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="my_task.py", __spec__=None))
    assert rerun_command(Shouting) == ["my_task.py", "train", "config.yaml"]
    spec = ModuleSpec("package.my_task", None, origin=str(tmp_path / "my_task.py"))
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="my_task.py", __spec__=spec))
    assert rerun_command(Shouting) == ["-m", "package.my_task", "train", "config.yaml"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("-", "standard input"),
        ("-c", r"the command line \(-c\)"),
        ("", "a prompt"),
        ("ipykernel_launcher.py", "a notebook"),
        ("deleted.py", "deleted.py, which is not, or no longer, a file"),
        ("pipe", "pipe, which is not, or no longer, a file"),
    ],
)
def test_a_program_that_no_rank_could_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # python <(cat my_task.py): it has been read
    Path("ipykernel_launcher.py").touch()
    main = SimpleNamespace() if program == "ipykernel_launcher.py" else SimpleNamespace(__file__=program)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [program, "train", "launch.nproc=2"])
    for use in (rerun_command, user_program):
        with pytest.raises(UserError, match=f"it came from {said}") as caught:
            use(Shouting)
        assert caught.value.exit_code == 2


def run_script(folder: str, arguments: list[str]) -> object:
    """What a script with ``drawbar.main(Shouting)`` as its last line does."""
    os.chdir(folder)
    sys.argv = ["shouting.py", *arguments]
    try:
        drawbar.main(Shouting)
    except SystemExit as end:
        return end.code


def test_a_script_has_the_whole_command_line(project: Path) -> None:
    settings = ["config.yaml", "train.steps=3", "task.loudness=2"]
    assert run_ranks(run_script, 1, str(project), ["train", *settings]) == [0]
    assert len(losses(project / "runs" / "tiny")) == 3
    assert "loudness: 2" in (project / "runs" / "tiny" / "config.yaml").read_text()
    assert run_ranks(run_script, 1, str(project), ["eval", "runs/tiny"]) == [0]
    assert run_ranks(run_script, 1, str(project), ["config", "explain", "task.loudness"]) == [0]
    assert run_ranks(run_script, 1, str(project), ["train", *settings, "task.loudnes=2"]) == [2]


def test_exit_codes_of_wrong_command_lines(project: Path) -> None:
    wrong = run_cli("trian", cwd=project)
    assert (wrong.code, wrong.out) == (2, "")
    assert "train" in wrong.err
    wrong = run_cli("train", "config.yaml", "--frok", "x", cwd=project)
    assert wrong.code == 2
    assert "--fork" in wrong.err
    wrong = run_cli("eval", cwd=project)
    assert wrong.code == 2
    assert "RUN" in wrong.err


@pytest.mark.parametrize("given", ["--local_rank=1", "--local-rank=1"])
def test_the_option_that_deepspeeds_launcher_adds(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [given, "config", "explain", "optim.lr"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    group.main(command, standalone_mode=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match=r"--local_rank is 1, but LOCAL_RANK is 0[\s\S]*fix:"):
        group.main(command, standalone_mode=False)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(UserError, match="LOCAL_RANK is not set"):
        group.main(command, standalone_mode=False)
    assert "local" not in group.get_help(click.Context(group))


@pytest.mark.exhaustive
def test_an_error_that_only_a_later_rank_finds_is_told(project: Path) -> None:
    """It waits for its launcher to end it, as after an error of the first rank; here there is none."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run_cli("train", "config.yaml", "optim.lrr=1", cwd=project, env=place)
    assert done.code == 2
    check_one_message(done.err, "optim.lrr")


def test_an_error_of_a_task_shows_where_it_happened(project: Path) -> None:
    (project / "broken.py").write_text(
        "import drawbar\n\nclass Broken(drawbar.CausalLM):\n    def loss(self, outputs, batch):\n        return 1 / 0\n"
    )
    done = run_cli("train", "config.yaml", "task.type=broken:Broken", cwd=project)
    assert done.code == 2
    assert "error: Broken.loss fails: ZeroDivisionError: division by zero" in done.err
    assert 'broken.py", line 5, in loss' in done.err
    assert not (project / "runs" / "tiny").exists()
