"""``CheckpointUploader``: uploads a run's checkpoints to an object store (``checkpoint.remote``) in background
threads."""

import json
import threading
import time
from pathlib import Path

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import MANIFEST_FILE, Unusable
from drawbar.checkpoint.object_store import ObjectStore, ObjectStoreError
from drawbar.checkpoint.read import complete_checkpoints
from drawbar.checkpoint.remote_checkpoints import ChangedDuringCopy, RemoteCheckpoints
from drawbar.checkpoint.remote_owner import HEARTBEAT_SECONDS, RemoteOwner, Superseded, wait_until_owner_ended
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger
from drawbar.train.remote_run_files import RemoteRunFiles
from drawbar.train.stop import Stop
from drawbar.util.atomic_files import write_durably

_OWNER_FILE = "remote.json"
"""File in the run directory with the owner number of the run's last process."""
_RETRY_SECONDS = 60.0
"""Seconds after a failed upload until the next attempt, unless a save comes first."""


def open_store(config: RunConfig) -> ObjectStore:
    """Open the run's folder in the store, which is named after the run, as the run directory is. Raises UserError if
    the URL cannot be used here."""
    return ObjectStore(f"{str(config.checkpoint.remote).rstrip('/')}/{config.run.name}")


def known_owner(config: RunConfig) -> int | None:
    """The owner number (``RemoteOwner``) of the last process that trained in this run directory, or None. That process
    has ended, as the caller holds the directory's lock."""
    try:
        values = json.loads((config.run_dir / _OWNER_FILE).read_text("utf-8"))
        return int(values["owner"]) if values["remote"] == config.checkpoint.remote else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class CheckpointUploader:
    """Mirrors the local checkpoints to the object store. When notified, it uploads new checkpoints one at a time,
    newest first, then deletes copies according to ``checkpoint.keep``. Training never waits for it. If the store does
    not answer, it warns and retries later; if another process takes over the run's folder in the store, it stops the
    run. Checkpoints not uploaded before the run ends are uploaded at the next start.
    """

    def __init__(self, config: RunConfig, stop: Stop) -> None:
        self._config = config
        self._directory = CheckpointDirectory(config.run_dir / "checkpoints")
        self._stop = stop
        self._store = open_store(config)
        self._remote = RemoteCheckpoints(self._store)
        self._run_files = RemoteRunFiles(self._store, config.run_dir)
        self._owner: RemoteOwner | None = None
        self._copied: dict[int, bytes] = {}  # step → manifest of what the store is known to have
        self._times_emptied = 0
        self._uploading: int | None = None
        self._is_closing = False
        self._has_given_up = False
        self._has_warned = False
        self._has_ended = threading.Event()
        self._wake = threading.Event()
        self._wake.set()  # an earlier process may have left checkpoints to upload
        self._threads = [
            threading.Thread(target=work, name=f"checkpoint-{name}", daemon=True)
            for name, work in (("uploader", self._run), ("owner", self._send_heartbeats))
        ]

    def claim(self) -> None:
        """Become the only process that writes to the run's folder in the store.

        Raises:
            ObjectStoreError: the store does not answer; checkpoints saved meanwhile are uploaded later.
            UserError: another process writes there, or the store has newer checkpoints than this disk.
        """
        before = wait_until_owner_ended(self._store, known_owner(self._config))
        newer = self._remote.complete().keys() - set(range(max(self._directory.steps(), default=-1) + 1))
        if newer:
            raise UserError(
                f"the store has a newer checkpoint of this run, of step {max(newer)}, than this disk",
                where=self._store.url,
                remedy="run the same command again to resume from it; for a separate run, choose another "
                "run.name or checkpoint.remote",
                exit_code=ExitCode.FAILED,
            )
        self._owner = RemoteOwner.claim(self._store, before)
        values = {"remote": self._config.checkpoint.remote, "owner": self._owner.number}
        write_durably(self._config.run_dir / _OWNER_FILE, json.dumps(values) + "\n")

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def protected(self) -> set[int]:
        """The step that is being uploaded, whose local checkpoint must not be deleted. Thread-safe."""
        step = self._uploading
        return set() if step is None else {step}

    @property
    def has_local(self) -> bool:
        """Whether there is a checkpoint on the disk."""
        return bool(self._directory.steps())

    def notify(self) -> None:
        """Notify the uploader of a new or changed checkpoint. Thread-safe; returns at once."""
        self._wake.set()

    def close(self) -> None:
        """Wait until everything is uploaded or the store has failed; warn about missing checkpoints."""
        self._is_closing = True
        self._wake.set()
        uploader = self._threads[0]
        uploader.join(1.0)
        if uploader.is_alive():
            logger.info(
                "waiting until %s has the last checkpoint; if this process is killed before that, the next start "
                "copies it",
                self._store.url,
            )
        uploader.join()
        self._has_ended.set()
        self._threads[1].join()
        if self._has_given_up:
            return
        left = [str(step) for step, _ in self._uncopied()]
        if left:
            steps = f"step{'s' if len(left) > 1 else ''} {', '.join(left)}"
            logger.warning("%s lacks %s: run the same command again to copy what is missing", self._store.url, steps)
        if self._owner is not None:
            try:
                self._owner.release()
            except UserError as error:
                logger.info("%s", error.what)

    def _run(self) -> None:
        has_failed = False
        while True:
            self._wake.wait(_RETRY_SECONDS if has_failed else None)
            self._wake.clear()
            is_last = self._is_closing  # read first: ``close`` called later wakes this thread for one more pass
            has_failed = not self._copy_all()
            if is_last or self._has_given_up:
                return

    def _copy_all(self) -> bool:
        """Upload everything new; return whether the store is up to date."""
        try:
            if self._owner is None:
                self.claim()
            self._forget_if_emptied()
            while self._copy_newest():
                pass
            self._prepare_commit()  # files written after the checkpoint, such as best.json
        except ObjectStoreError as error:
            self._warn(error.what)
            return False
        except UserError as error:
            self._has_given_up = True
            self._stop.fail(error)
            return False
        except OSError as error:
            self._warn(str(error))
            return False
        self._has_warned = False
        return True

    def _forget_if_emptied(self) -> None:
        """Upload everything again if the run's folder in the store was emptied."""
        assert self._owner is not None
        self._owner.check()
        if self._owner.times_emptied != self._times_emptied:
            logger.warning("%s was emptied: everything is copied there again", self._store.url)
            self._times_emptied = self._owner.times_emptied
            self._copied.clear()
            self._run_files = RemoteRunFiles(self._store, self._config.run_dir)

    def _warn(self, reason: str) -> None:
        """Warn once, until an upload succeeds again."""
        if not self._has_warned:
            logger.warning("checkpoints are not copied for now; training continues: %s", reason)
        self._has_warned = True

    def _copy_newest(self) -> bool:
        """Upload the newest checkpoint that the store lacks; False if it has all."""
        assert self._owner is not None
        step, folder = next(iter(self._uncopied()), (None, None))
        if step is None or folder is None:
            return False
        self._uploading = step
        try:
            self._copied[step] = self._remote.upload(folder, self._prepare_commit)
            self._remote.rotate(self._config.checkpoint.keep, self._best(), self._owner.check)
        except (ChangedDuringCopy, FileNotFoundError, Unusable):
            time.sleep(0.5)  # a save is replacing or deleting it
        finally:
            self._uploading = None
        return True

    def _prepare_commit(self) -> None:
        """Check ownership, and upload the run's other files, so that they are never older than the checkpoint."""
        assert self._owner is not None
        self._owner.check()
        self._run_files.put()

    def _uncopied(self) -> list[tuple[int, Path]]:
        """Local checkpoints that the store lacks, newest first."""
        found = []
        for step, folder in reversed(complete_checkpoints(self._directory.path).items()):
            try:
                if self._copied.get(step) != (folder / MANIFEST_FILE).read_bytes():
                    found.append((step, folder))
            except FileNotFoundError:
                continue
        return found

    def _best(self) -> set[int]:
        return self._directory.kept_as_best() if self._config.checkpoint.keep_best else set()

    def _send_heartbeats(self) -> None:
        while not self._has_ended.wait(HEARTBEAT_SECONDS):
            try:
                if self._owner is not None:
                    self._owner.heartbeat()
                    if self._owner.times_emptied != self._times_emptied:
                        self.notify()
            except Superseded as error:
                self._stop.fail(error)
                return
            except UserError:
                continue  # the uploader warns if there is something to copy


def start_uploader(config: RunConfig, world: Distributed, stop: Stop) -> CheckpointUploader | None:
    """Start the run's uploader on rank 0, and return it; None on other ranks and without ``checkpoint.remote``.
    Collective.

    Raises:
        UserError: as ``claim``, on every rank; for an ObjectStoreError, only if the disk has no checkpoint.
    """
    uploaders: list[CheckpointUploader] = []

    def start() -> None:
        uploader = CheckpointUploader(config, stop)
        try:
            uploader.claim()
        except ObjectStoreError as error:
            if not uploader.has_local:
                raise  # the run would lose nothing by ending now, and the error may be permanent
            logger.warning("checkpoints are not copied for now: %s", error.what)
        uploader.start()
        uploaders.append(uploader)

    if config.checkpoint.remote is None:
        return None
    world.from_rank0(start, "opening the store of the checkpoints")
    return uploaders[0] if uploaders else None
