"""The container that a job runs in: Apptainer, Singularity, or pyxis, which is a part of Slurm's srun.

The scheduler's programs stay outside, and start the container on each node. Apptainer and pyxis both pass the
environment on, so variables are exported and not written into options, where commas and quotes mean something.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from drawbar.config.schema.run_config import RunConfig
from drawbar.errors import UserError
from drawbar.jobs.settings import INVALID_IN_BIND, ClusterSection, Runtime, choose_runtime, is_file

PYTHON = "python3"
"""The name of an image's interpreter, unless the user gives another."""
VARIABLES = {"PYTHONNOUSERSITE": "1"}
"""Set in every container: packages in ~/.local are for another Python, and would come before those of the image."""
_HUB_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
_BIND_REMEDY = "rename the folder: commas, colons, backslashes, ^ and spaces at the ends mean something else in a bind"
_IMAGE_REMEDY = "give the path of a file; an image of a registry is docker://NAME, or for pyxis REGISTRY#NAME"


@dataclass(frozen=True)
class Container:
    """An image, what runs it, and what it sees of the node."""

    runtime: Runtime
    image: str
    """A name in a registry, or an absolute path."""
    workdir: Path
    binds: tuple[str, ...]
    """``/outside:/inside``, or the same with ``:ro``; sorted so that a folder comes before the folders inside it."""
    made: tuple[str, ...] = ()
    """Folders of ``binds`` to make if they are not there yet."""
    home: str | None = None
    gpus: bool = False
    variables: tuple[str, ...] = ()
    """For pyxis: names of variables that keep their values in the container even if the image sets others."""
    any_runtime: bool = False
    """Whether Singularity may replace Apptainer."""

    def options(self) -> list[str]:
        """Apptainer's arguments between ``exec`` and the command, or pyxis's options of srun."""
        if self.runtime == "pyxis":
            found = [
                f"--container-image={self.image}",
                f"--container-mounts={','.join(self.binds)}",
                f"--container-workdir={self.workdir}",
                "--container-mount-home",
            ]
            return [*found, f"--container-env={','.join(self.variables)}"] if self.variables else found
        found = ["--nv"] if self.gpus else []
        found += [f"--bind={bind}" for bind in self.binds]
        found += [] if self.home is None else [f"--home={self.home}"]
        return [*found, f"--pwd={self.workdir}", self.image]

    def script(self) -> list[str]:
        """Lines of bash that set the array ``container``: what goes between srun's options and the command."""
        lines = [f"mkdir -p -- {shlex.join(self.made)} || exit"] if self.made else []
        if self.runtime != "pyxis":
            lines += self._find_runtime()
        lines += ["# shellcheck disable=SC2054  # commas are pyxis's"] if self.runtime == "pyxis" else []
        return [*lines, "container=(", *(f"  {word}" for word in self._words()), ")"]

    def _words(self) -> list[str]:
        program = [] if self.runtime == "pyxis" else ['"$runtime" exec']
        return program + [shlex.quote(option) for option in self.options()]

    def _find_runtime(self) -> list[str]:
        """Lines of bash that find the runtime on the node, or end the job."""
        lines = [f"runtime={self.runtime}"]
        if self.any_runtime:
            lines.append('command -v "$runtime" > /dev/null || runtime=singularity  # it has the same options')
        return [
            *lines,
            'if ! command -v "$runtime" > /dev/null; then',
            f"  echo 'error: there is no {' or '.join(self._runtime_names())} on the node' >&2",
            "  echo '  fix:   load it by cluster.modules or cluster.setup, or name another in cluster.container' >&2",
            "  exit 1",
            "fi",
        ]

    def _runtime_names(self) -> list[str]:
        return [self.runtime, "singularity"] if self.any_runtime else [self.runtime]


def make_container(
    config: RunConfig, cluster: ClusterSection, workdir: Path, environ: Mapping[str, str] = os.environ
) -> Container | None:
    """The container of a job; None if it has none.

    Raises:
        UserError: a folder cannot be bound, or a file of the configuration would not be seen.
    """
    if cluster.image is None:
        return None
    runtime = choose_runtime(cluster.image, cluster.container)
    variables = {**VARIABLES, **cluster.environment}
    known = {**environ, **variables}
    caches = [str(config.cache_dir), *(known[name] for name in _HUB_FOLDERS if known.get(name))]
    needed = [str(workdir), config.run.dir, *caches]
    folders = _folders_to_bind([os.path.abspath(workdir / path) for path in needed])
    image = os.path.abspath(workdir / cluster.image) if is_file(cluster.image, runtime) else cluster.image
    home = cluster.home and os.path.abspath(workdir / cluster.home)
    _check_paths(folders, image, home)
    binds = sorted([*(f"{folder}:{folder}" for folder in folders), *cluster.binds], key=_inside)
    _check_files(config, workdir, [*map(_inside, binds), home or str(Path.home())])
    return Container(
        runtime=runtime,
        image=image,
        workdir=workdir,
        binds=tuple(binds),
        made=tuple(path for path in (os.path.abspath(workdir / path) for path in caches) if path in folders),
        home=home,
        gpus=_wants_gpus(config, cluster),
        variables=tuple(variables),
        any_runtime=cluster.container == "auto",
    )


def _wants_gpus(config: RunConfig, cluster: ClusterSection) -> bool:
    return (
        config.device == "cuda"
        or cluster.gpus_per_node is not None
        or any(name.startswith("gpus") for name in cluster.options)
    )


def _check_paths(folders: list[str], image: str, home: str | None) -> None:
    for path in [*folders, *([] if home is None else [home])]:
        if INVALID_IN_BIND.search(path):
            raise UserError(
                f"no container can be given this path: {path!r}", where="cluster.image", remedy=_BIND_REMEDY
            )
    if image.startswith("/") and INVALID_IN_BIND.search(image):
        raise UserError(f"an image cannot have this path: {image!r}", where="cluster.image", remedy=_IMAGE_REMEDY)


def _inside(bind: str) -> str:
    return bind.split(":")[1]


def check_image(container: Container) -> None:
    """Refuse a missing image before a job waits for it in a queue.

    Raises:
        UserError: the file does not exist, or cannot be read.
    """
    image = Path(container.image)
    if image.is_absolute() and not os.access(image, os.R_OK):
        raise UserError(
            f"there is no image {image}, or you may not read it",
            where="cluster.image",
            remedy=_IMAGE_REMEDY,
        )


def _folders_to_bind(paths: list[str]) -> list[str]:
    """The folders to bind so that all paths and the targets of their symlinks are visible, without duplicates."""
    folders: list[str] = []
    for path in paths:
        if not any(_is_in(path, folder) for folder in folders):
            folders.append(path)
        elif not _is_visible(path, folders):  # a link in a folder that is bound leads out of it
            folders.append(os.path.realpath(path))
    return folders


def _is_visible(path: str, folders: list[str]) -> bool:
    real = os.path.realpath(path)
    return any(_is_in(path, folder) for folder in folders) and any(
        _is_in(real, known) for folder in folders for known in (folder, os.path.realpath(folder))
    )


def _is_in(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _check_files(config: RunConfig, workdir: Path, folders: list[str]) -> None:
    """Refuse a configuration that names files which exist here, but which the container would not see."""
    for key, text in _texts("", config.model_dump(exclude={"cluster", "run"})):
        path = os.path.abspath(workdir / text)
        if os.path.exists(path) and not _is_visible(path, folders):
            folder = path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))
            raise UserError(
                f"{key}={text} lies outside of the folders that the container sees",
                where="cluster.binds",
                remedy=f"set cluster.binds=[{folder}]",
            )


def _texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    """The texts of a configuration, each with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(f"{key}.{name}".lstrip("."), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(key, inner)
