"""Runs that copy their checkpoints to an object store, which is a real S3 server: they go on from it on a machine that
has nothing, and survive what goes wrong with it."""

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import drawbar
from conftest import make_project
from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.object_store import ObjectStore
from drawbar.checkpoint.read import open_snapshot
from drawbar.checkpoint.remote_owner import RemoteOwner, wait_until_owner_ended
from drawbar.errors import ExitCode, UserError
from harness import Finished, run_cli, start_cli, wait_until
from object_server import BUCKET, ObjectServer, killing
from runs import Fit, fit_in, losses, metrics, scores

SETTINGS = ("optim.schedule=constant", "eval.every=4", "checkpoint.keep=2")
TRAIN = ("train", "config.yaml", *SETTINGS)
PARTS = ("parallel.strategy=fsdp", "launch.nproc=2", "train.micro_batch=2", "checkpoint.layout=parts")


@pytest.fixture
def remote(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The setting, with a folder of its own for each test."""
    server.use(monkeypatch)
    return f"checkpoint.remote=s3://{BUCKET}/{request.node.name}"


@pytest.fixture
def folder(remote: str) -> str:
    """The run's folder in the bucket."""
    return f"{remote.partition(f'{BUCKET}/')[2]}/tiny"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    project = make_project(tmp_path_factory.mktemp("whole"))
    assert fit_in(project, *SETTINGS).exit_code == ExitCode.DONE
    return project / "runs" / "tiny"


def check_same(run: Path, whole: Path) -> None:
    assert losses(run) == losses(whole)
    assert scores(run) == scores(whole)
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(whole)]
    wanted, found = (open_snapshot(each / "checkpoints" / "step-00000012") for each in (whole, run))
    for theirs, ours in ((wanted.model, found.model), (wanted.optimizer, found.optimizer)):
        for name in theirs:
            assert torch.equal(theirs[name], ours[name]), name
    assert (
        CheckpointDirectory(run / "checkpoints").best_record()
        == CheckpointDirectory(whole / "checkpoints").best_record()
    )


def lose_the_disk(project: Path) -> None:
    shutil.rmtree(project / "runs")


@pytest.mark.exhaustive
def test_a_run_goes_on_on_a_machine_that_has_nothing(
    server: ObjectServer, remote: str, folder: str, whole: Path, project: Path, run: Path, fit: Fit
) -> None:
    assert fit(*SETTINGS, remote, "train.steps=8").exit_code == ExitCode.DONE
    assert server.steps(folder) == CheckpointDirectory(run / "checkpoints").steps()
    everything = b"".join(server.read(f"{folder}/{name}") for name in server.names(f"{folder}/"))
    assert server.env["AWS_SECRET_ACCESS_KEY"].encode() not in everything
    newest = run / "checkpoints" / "step-00000008"
    kept = {path.name: path.read_bytes() for path in newest.iterdir()}
    lose_the_disk(project)
    with pytest.raises(UserError, match=r"(?s)exists already, .*\nthe store has its checkpoints up to step 8") as no:
        fit(*SETTINGS, remote, "optim.lr=0.5")
    assert "delete" not in str(no.value.remedy)
    assert not run.exists()
    assert fit(*SETTINGS, remote, "train.steps=8").exit_code == ExitCode.DONE  # nothing is left to do
    assert {path.name: path.read_bytes() for path in newest.iterdir()} == kept
    lose_the_disk(project)
    assert fit(*SETTINGS, remote).exit_code == ExitCode.DONE
    check_same(run, whole)
    assert server.steps(folder) == CheckpointDirectory(run / "checkpoints").steps()


@pytest.mark.exhaustive
def test_a_fork_goes_on_on_a_machine_that_has_nothing(
    server: ObjectServer, remote: str, project: Path, run: Path, fit: Fit
) -> None:
    """The same command finds the fork in the store, though the run that it began from is gone with the disk."""
    fit(*SETTINGS, remote)
    fit(*SETTINGS, remote, "train.steps=14", fork="longer")
    lose_the_disk(project)
    with pytest.raises(UserError, match="nothing to fork"):
        fit(*SETTINGS, remote, "train.steps=16", fork="another")
    assert fit(*SETTINGS, remote, "train.steps=16", fork="longer").exit_code == ExitCode.DONE
    assert sorted(losses(run.with_name("longer"))) == [13, 14, 15, 16]
    assert not run.exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("resume", ["best", "runs/tiny/checkpoints/step-00000012"])
def test_a_fork_from_a_named_checkpoint_goes_on_though_that_is_gone(
    resume: str, server: ObjectServer, remote: str, project: Path, run: Path, fit: Fit
) -> None:
    fit(*SETTINGS, remote)
    fit(*SETTINGS, remote, "train.steps=14", fork="named", resume=resume)
    lose_the_disk(project)
    assert fit(*SETTINGS, remote, "train.steps=16", fork="named", resume=resume).exit_code == ExitCode.DONE
    assert sorted(losses(run.with_name("named")))[-1] == 16
    if resume != "best":
        with pytest.raises(UserError, match="which began from step-00000012"):
            fit(*SETTINGS, remote, fork="named", resume=resume.replace("12", "08"))


@pytest.mark.exhaustive
def test_a_folder_that_somebody_empties_is_filled_again(
    server: ObjectServer, remote: str, folder: str, run: Path, fit: Fit
) -> None:
    """No other process writes there: the run goes on, and copies everything anew."""

    class Emptied(drawbar.Callback):
        def on_step(self, run: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
            if info.step == 10:
                wait_until(lambda: server.steps(folder), "a first copy")
                for name in server.names(f"{folder}/"):
                    server.s3.delete_object(Bucket=BUCKET, Key=f"{folder}/{name}")

    assert fit(*SETTINGS, remote, callbacks=[Emptied()]).exit_code == ExitCode.DONE
    assert "was emptied: everything is copied there again" in (run / "logs" / "rank-0000.log").read_text()
    assert server.steps(folder) == CheckpointDirectory(run / "checkpoints").steps()
    lose_the_disk(run.parent.parent)
    assert fit(*SETTINGS, remote).exit_code == ExitCode.DONE


@pytest.mark.exhaustive
def test_a_refused_copy_leaves_no_run_behind(
    server: ObjectServer, remote: str, folder: str, project: Path, run: Path, fit: Fit
) -> None:
    fit(*SETTINGS, remote)
    for name in server.names(f"{folder}/checkpoints/"):
        if name.endswith("model-00000.safetensors"):
            server.s3.put_object(Bucket=BUCKET, Key=f"{folder}/checkpoints/{name}", Body=b"not this")
    lose_the_disk(project)
    for _ in range(2):
        with pytest.raises(UserError, match="of the copies of this run's checkpoints none can be used"):
            fit(*SETTINGS, remote)
        assert {path.name for path in run.iterdir()} <= {".lock"}


@pytest.mark.exhaustive
def test_a_damaged_config_of_the_store_is_named_there(
    server: ObjectServer, remote: str, folder: str, project: Path, fit: Fit
) -> None:
    fit(*SETTINGS, remote)
    server.s3.put_object(Bucket=BUCKET, Key=f"{folder}/config.yaml", Body=b"train: [1")
    lose_the_disk(project)
    with pytest.raises(UserError, match=r"config\.yaml is damaged") as refused:
        fit(*SETTINGS, remote)
    assert f"{BUCKET}/{folder}/config.yaml" in str(refused.value.remedy)


@pytest.mark.exhaustive
def test_parts_of_two_ranks(server: ObjectServer, remote: str, folder: str, project: Path, run: Path) -> None:
    for settings in (("run.name=whole",), (remote, "train.steps=8"), (remote,)):
        done = run_cli(*TRAIN, *PARTS, *settings, cwd=project, env=server.env)
        assert done.code == 0, done.err
        if settings[-1] == "train.steps=8":
            shutil.rmtree(run)
    assert any("model-00001.safetensors" in name for name in server.names(f"{folder}/"))
    check_same(run, project / "runs" / "whole")


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.25, 0.7])
def test_killed_while_it_copies(
    share: float, server: ObjectServer, remote: str, folder: str, whole: Path, project: Path, run: Path, tmp_path: Path
) -> None:
    """SIGKILL at a request chosen by chance, in the first or the second half of all; then the disk is lost."""
    with server.failing(lambda *_: None):
        fit_in(project, *SETTINGS, f"{remote}/counted")
        at = round(server.count * (share + random.uniform(-0.2, 0.2))) or 1
    lose_the_disk(project)
    output = tmp_path / "output"
    output.mkdir()
    started = threading.Event()

    def pid() -> int:
        started.wait()
        assert process.pid is not None
        return process.pid

    with server.failing(killing(pid, at)):
        process = start_cli(*TRAIN, remote, cwd=project, output=output, env=server.env)
        started.set()
        process.join(120)
    assert process.exitcode == -9, f"request {at}: {(output / '0.err').read_text()}"
    lose_the_disk(project)
    done = run_cli(*TRAIN, remote, cwd=project, env=server.env)
    assert done.code == 0, f"request {at}: {done.err}"
    check_same(run, whole)
    stored, names = server.steps(folder), server.names(f"{folder}/checkpoints/step-")
    assert {*CheckpointDirectory(run / "checkpoints").steps()} <= {*stored}, f"request {at}"
    assert {int(name[:8]) for name in names} == {*stored}, f"request {at}"


@pytest.mark.exhaustive
def test_a_damaged_copy(
    server: ObjectServer, remote: str, folder: str, whole: Path, project: Path, run: Path, fit: Fit
) -> None:
    fit(*SETTINGS, remote)
    assert server.steps(folder)[-2:] == [8, 12]
    key = f"{folder}/checkpoints/step-00000012/optimizer-00000.safetensors"
    content = bytearray(server.read(key))
    content[len(content) // 3] ^= 1
    server.write(key, bytes(content))
    lose_the_disk(project)
    done = run_cli(*TRAIN, remote, cwd=project, env=server.env)
    assert done.code == 0, done.err
    assert "step-00000012 of s3://" in done.err, done.err
    assert "optimizer-00000.safetensors is not as it was written" in done.err
    check_same(run, whole)
    assert bytes(content) != server.read(key)
    lose_the_disk(project)
    fit(*SETTINGS, remote)
    check_same(run, whole)

    name = next(name for name in server.names(f"{folder}/tokenizer/") if name.endswith(".json"))
    server.write(f"{folder}/tokenizer/{name}", server.read(f"{folder}/tokenizer/{name}")[:-1])
    lose_the_disk(project)
    with pytest.raises(UserError, match=f"tokenizer/{name} of the run's copy"):
        fit(*SETTINGS, remote)


@pytest.mark.exhaustive
@pytest.mark.parametrize("damaged", [{8}, {4, 8}], ids=["newest", "all"])
def test_damage_on_the_disk_is_mended_from_the_store(
    damaged: set[int], remote: str, folder: str, server: ObjectServer, whole: Path, run: Path, fit: Fit
) -> None:
    """The damaged files have the right size."""
    fit(*SETTINGS, remote, "train.steps=8")
    for step in damaged:
        path = run / "checkpoints" / f"step-{step:08d}" / "model-00000.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert fit(*SETTINGS, remote).exit_code == ExitCode.DONE
    check_same(run, whole)
    assert server.steps(folder) == CheckpointDirectory(run / "checkpoints").steps()


@pytest.mark.exhaustive
def test_a_store_that_is_down(
    server: ObjectServer,
    remote: str,
    folder: str,
    project: Path,
    run: Path,
    whole: Path,
    fit: Fit,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It answers again later, or not before the end of the run; the next start copies what is missing."""
    unusable = "the store of this run's checkpoints cannot be used"
    with server.failing(lambda *_: 500), pytest.raises(UserError, match=unusable):
        fit(*SETTINGS, remote)
    assert not run.exists()

    with server.failing(lambda number, *_: 500 if number > 4 else None):
        assert fit(*SETTINGS, remote).exit_code == ExitCode.DONE
    said = capfd.readouterr().err
    assert f"s3://{BUCKET}/{folder} lacks step" in said
    assert said.count("training continues") == 1
    assert server.steps(folder) == []
    check_same(run, whole)

    assert fit(*SETTINGS, remote).exit_code == ExitCode.DONE
    assert server.steps(folder) == CheckpointDirectory(run / "checkpoints").steps()

    with server.failing(lambda *_: 500):
        assert fit(*SETTINGS, remote, "train.steps=14").exit_code == ExitCode.DONE
    assert "resumes from its own disk" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_told_to_stop_while_it_copies(
    server: ObjectServer, remote: str, folder: str, project: Path, run: Path, tmp_path: Path
) -> None:
    """The store is slow. The run waits until its last checkpoint is there, and the next process may begin at once."""
    begun = threading.Event()

    def slow(_: int, method: str, path: str) -> None:
        if method == "PUT" and path.endswith("/model-00000.safetensors"):
            begun.set()
            time.sleep(1.5)

    output = tmp_path / "output"
    output.mkdir()
    with server.failing(slow):
        process = start_cli(*TRAIN, remote, "train.steps=4000", cwd=project, output=output, env=server.env)
        assert begun.wait(120)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(120)
    said = (output / "0.err").read_text()
    assert process.exitcode == ExitCode.REQUEUE, said
    assert f"waiting until s3://{BUCKET}/{folder} has the last checkpoint" in said
    newest = CheckpointDirectory(run / "checkpoints").steps()[-1]
    assert server.steps(folder)[-1] == newest < 4000
    assert wait_until_owner_ended(ObjectStore(f"s3://{BUCKET}/{folder}"), ended=None) == 1


def refusal(server: ObjectServer, project: Path, *settings: str) -> Finished:
    done = run_cli(*TRAIN, *settings, cwd=project, env=server.env)
    assert done.code == ExitCode.WRONG_REQUEST, done.err
    assert "Traceback" not in done.err
    assert not (project / "runs").exists()
    return done


@pytest.mark.exhaustive
def test_two_runs_that_write_one_folder(
    server: ObjectServer, remote: str, folder: str, project: Path, run: Path, fit: Fit
) -> None:
    store = ObjectStore(f"s3://{BUCKET}/{folder}")
    owner, ended = RemoteOwner.claim(store, before=0), threading.Event()

    def live() -> None:
        while not ended.wait(0.2):
            owner.heartbeat()

    alive = threading.Thread(target=live)
    alive.start()
    try:
        assert "is training this run" in refusal(server, project, remote).err
    finally:
        ended.set()
        alive.join()
    owner.release()

    class Taker(drawbar.Callback):
        def on_step(self, handle: drawbar.RunHandle, info: drawbar.StepInfo) -> None:
            if info.step == 5:
                RemoteOwner.claim(store, before=max(int(name[:8]) for name in store.sizes("owner")))

    project_error = None
    try:
        fit_in(project, *SETTINGS, remote, "train.steps=400", callbacks=[Taker()])
    except UserError as error:
        project_error = error
    assert project_error is not None
    assert "writes this run's checkpoints to the store now" in project_error.what
    assert project_error.exit_code == ExitCode.FAILED
    own = CheckpointDirectory(run / "checkpoints").steps()
    assert own
    assert own[-1] < 400
    assert own[-1] not in server.steps(folder)


def test_what_cannot_work_is_refused(server: ObjectServer, remote: str, project: Path) -> None:
    secret = refusal(server, project, "checkpoint.remote=s3://key:pass/word@bucket/runs")
    assert "the URL contains a password or an option" in secret.err
    assert "pass/word" not in secret.err + secret.out
    assert (
        "there is no kind of store nonsense://" in refusal(server, project, "checkpoint.remote=nonsense://bucket").err
    )
    with pytest.raises(UserError, match="cannot be used: writing s3://no-such-bucket/"):
        fit_in(project, "checkpoint.remote=s3://no-such-bucket/runs")
    assert not (project / "runs").exists()
    assert "expected a URL" in refusal(server, project, "checkpoint.remote=bucket/runs").err
