"""``RemoteRunFiles``: copies of a run's files other than its checkpoints in an object store, so that another machine
can resume the run."""

import hashlib
import json
import re
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from drawbar.checkpoint.format import FileEntry, file_entry
from drawbar.checkpoint.object_store import ObjectStore
from drawbar.config.io.load_config import SCRIPT_FILE
from drawbar.errors import ExitCode, UserError
from drawbar.models.folder import INITIAL_MODEL
from drawbar.train.memory_probe import MICRO_BATCH_FILE
from drawbar.train.rundir import ORIGIN_FILE
from drawbar.util.atomic_files import identity, replacing, sync
from drawbar.util.best_score import BEST_FILE

CONFIG = "config.yaml"
_BEST = f"checkpoints/{BEST_FILE}"
_INDEX = "run-files.json"
_FIXED = ("task.json", SCRIPT_FILE, "reference-*.safetensors", "tokenizer/*", f"{INITIAL_MODEL}/*")
"""Files that never change during a run. Their checksums are in the index, and are verified after a download."""
_CHANGING = (CONFIG, ORIGIN_FILE, MICRO_BATCH_FILE, "metrics.jsonl", "tracking/*.json", _BEST)
"""Files that a run rewrites. They have no checksums. A run takes only the micro-batch size, ``eval.mode`` and the best
checkpoint from them; the rest is compared with the run's own settings and devices, tells trackers which run to resume,
or is read by people."""
_FIXED_NAME = re.compile(
    rf"task\.json|{re.escape(SCRIPT_FILE)}|reference-[A-Za-z0-9_-]+\.safetensors|"
    rf"(tokenizer|{re.escape(INITIAL_MODEL)})/[A-Za-z0-9_][A-Za-z0-9._-]*"
)
_CHANGING_NAME = re.compile(
    rf"{re.escape(ORIGIN_FILE)}|{re.escape(MICRO_BATCH_FILE)}|metrics\.jsonl|tracking/[A-Za-z0-9_][A-Za-z0-9._-]*\.json"
)
_TEMPORARY_FOLDER = "fetched.tmp"
_LARGEST = 64 * 2**20
"""Upper limit on the bytes of the index, of ``config.yaml`` and of ``best.json``."""


class _Index(BaseModel):
    """``run-files.json``: size and checksum of each file of ``_FIXED``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    files: dict[str, FileEntry]
    sha256: str
    """Checksum of ``files``."""

    @classmethod
    def of(cls, files: dict[str, FileEntry]) -> "_Index":
        text = json.dumps({name: entry.model_dump() for name, entry in files.items()}, sort_keys=True)
        return cls(files=files, sha256=hashlib.sha256(text.encode()).hexdigest())


class RemoteRunFiles:
    """The files of ``run_dir`` and their copies in ``store``. Methods raise ObjectStoreError if the store does not
    answer."""

    def __init__(self, store: ObjectStore, run_dir: Path) -> None:
        self._store = store
        self._run_dir = run_dir
        self._copied: dict[str, tuple[int, int, int, int]] = {}
        self._has_index = False

    def put(self) -> None:
        """Upload the files that have changed since the last call."""
        for name in filter(self._has_changed, self._names(_CHANGING)):
            found = identity(self._run_dir / name)  # before reading: it may grow meanwhile
            self._store.put(name, self._run_dir / name)
            self._copied[name] = found
        fixed = self._names(_FIXED)
        if not any(map(self._has_changed, fixed)) and self._has_index:
            return
        index = _Index.of({name: file_entry(self._run_dir / name) for name in fixed})
        before = self._read_index()
        if before != index:
            there, sizes = {} if before is None else before.files, self._store.sizes()
            for name, entry in index.files.items():
                if there.get(name) != entry or sizes.get(name) != entry.size:
                    self._store.put(name, self._run_dir / name)
            self._store.write(_INDEX, index.model_dump_json(indent=2).encode())
        self._copied |= {name: identity(self._run_dir / name) for name in fixed}
        self._has_index = True

    def _has_changed(self, name: str) -> bool:
        return self._copied.get(name) != identity(self._run_dir / name)

    def _names(self, patterns: tuple[str, ...]) -> list[str]:
        found = [path for pattern in patterns for path in sorted(self._run_dir.glob(pattern)) if path.is_file()]
        return [str(path.relative_to(self._run_dir)) for path in found]

    def _read_index(self) -> _Index | None:
        """The index; None if it is missing or damaged."""
        try:
            index = _Index.model_validate_json(self._read(_INDEX) or b"")
        except ValidationError:
            return None
        return index if index == _Index.of(index.files) else None

    def config(self) -> bytes | None:
        """The run's ``config.yaml`` in the store, or None."""
        return self._read(CONFIG)

    def best(self) -> bytes | None:
        """The run's ``best.json`` in the store, or None."""
        return self._read(_BEST)

    def _read(self, name: str) -> bytes | None:
        if not 0 < self._store.sizes().get(name, 0) <= _LARGEST:
            return None
        return self._store.read(name)

    def fetch(self) -> None:
        """Download the files that the run directory lacks, and always the metrics; but not ``config.yaml`` and
        ``best.json``, which the caller gets from ``config`` and ``best``.

        Raises:
            UserError: a file that affects the computation is damaged; the message names it.
        """
        drafts = self._run_dir / _TEMPORARY_FOLDER
        shutil.rmtree(drafts, ignore_errors=True)
        sizes, index = self._store.sizes(), self._read_index()
        if index is None:
            raise self._damaged(_INDEX, "is missing or damaged")
        for name, entry in index.files.items():
            if (self._run_dir / name).exists():  # a whole folder, or nothing of it: see _move_into_place
                continue
            if not _FIXED_NAME.fullmatch(name) or sizes.get(name) != entry.size:
                raise self._damaged(name, f"has {sizes.get(name)} bytes instead of {entry.size}")
            self._fetch(name, drafts)
            if file_entry(drafts / name) != entry:
                raise self._damaged(name, "does not have its checksum")
        for name in filter(_CHANGING_NAME.fullmatch, sizes):
            self._fetch(name, drafts)
        self._move_into_place(drafts)

    def _fetch(self, name: str, drafts: Path) -> None:
        target = drafts / name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._store.get(name, target)
        sync(target)

    def _move_into_place(self, drafts: Path) -> None:
        """Move the downloaded files into the run directory."""
        for draft in sorted(drafts.iterdir()) if drafts.is_dir() else []:
            target = self._run_dir / draft.name
            if target.exists() and draft.name != "metrics.jsonl":
                continue
            if draft.is_dir():
                sync(draft)
            if target.exists():
                with draft.open("rb") as fetched, replacing(target) as file:
                    shutil.copyfileobj(fetched, file)
            else:
                draft.replace(target)
        sync(self._run_dir)
        shutil.rmtree(drafts, ignore_errors=True)

    def _damaged(self, name: str, how: str) -> UserError:
        return UserError(
            f"{name} of the run's copy {how}",
            where=self._store.url,
            remedy=f"restore {name} from the run directory, if it exists; or start over under another run.name",
            exit_code=ExitCode.FAILED,
        )
