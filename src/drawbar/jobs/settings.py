"""The section ``cluster``: what a scheduler must know to run a job, and profiles that keep it for all of a user's runs.

A profile is a file ``~/.config/drawbar/clusters/NAME.yaml`` with the keys of the section; the run's own file and the
command line overrule it.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from drawbar.config.io.source import Origin, Settings, read_file
from drawbar.config.schema.guest_section import GuestSection
from drawbar.config.schema.section import SECRET, Count, PathText, Text, expand_path, text_of
from drawbar.errors import UserError, nearest
from drawbar.jobs.hosts_file import check_hosts, parse_host
from drawbar.jobs.slurm.queries import check_time, parse_time
from drawbar.util.byte_sizes import parse_size

Runtime = Literal["apptainer", "singularity", "pyxis"]
RuntimeOrAuto = Literal["auto", "apptainer", "singularity", "pyxis"]

INVALID_IN_BIND = re.compile(r"[,:^\\\x00-\x1f\x7f]|^\s|\s$")
"""Characters that no path in a bind may have: binds are split at commas and colons, and Apptainer loses the others."""
_SQUASHFS = (".sqsh", ".sqfs", ".squashfs")
_NOT_PASSED_TO_CONTAINER = ("PATH", "LD_LIBRARY_PATH", "HOME")


def _bind(text: str) -> str:
    source, *rest = text.split(":")
    target, *options = rest or [source]
    source, target = expand_path(source), expand_path(target)
    for path in (source, target):
        if not path.startswith("/") or INVALID_IN_BIND.search(path):
            raise ValueError(
                f"expected /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro with absolute paths, got {text!r}; no "
                "container program can bind a path with a comma, colon, backslash or ^, or with spaces at its ends"
            )
    if options not in ([], ["ro"], ["rw"]):
        raise ValueError(f"expected ro, rw or nothing after the second colon, got {text!r}")
    return ":".join([source, target, *options])


BindText = Annotated[Text, AfterValidator(_bind)]


def _image(text: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", text) or text.startswith("-"):
        raise ValueError(f"{text!r} is the name of no image")
    return text


ImageText = Annotated[PathText, AfterValidator(_image)]


def is_file(image: str, runtime: Runtime) -> bool:
    """Whether an image is a file or a folder, and no name in a registry."""
    if "://" in image:
        return False
    return runtime != "pyxis" or image.startswith((".", "/")) or image.endswith(_SQUASHFS)


def choose_runtime(image: str, container: RuntimeOrAuto) -> Runtime:
    """What runs the image. For ``auto``: pyxis, if the name has pyxis's own spelling or is its kind of file; for all
    others Apptainer (or Singularity, on a node that has it in Apptainer's place)."""
    if container != "auto":
        return container
    return "pyxis" if ("#" in image and not image.startswith("/")) or image.endswith(_SQUASHFS) else "apptainer"


def lost_variables(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that a container would not get from outside, as it sets them itself."""
    return [name for name in names if name in _NOT_PASSED_TO_CONTAINER]


Name = Annotated[str, text_of("letters, digits and _ . , @ + -", r"^[A-Za-z0-9_][A-Za-z0-9_.,@+-]*$", max_length=128)]
"""A name, or several with commas, that cannot be taken for an option or for a part of a shell command."""
Module = Annotated[
    str, text_of("letters, digits and _ . , @ + / -", r"^[A-Za-z0-9_][A-Za-z0-9_.,@+/-]*$", max_length=128)
]
TimeLimit = Annotated[str, AfterValidator(check_time)]

_TYPED_GPUS = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*):([1-9][0-9]{0,3})")
RESERVED_OPTIONS = {
    "account", "array", "chdir", "cpus-per-task", "error", "export", "gpus-per-node", "job-name", "nodes", "no-requeue",
    "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "partition", "requeue", "signal", "test-only",
    "time", "wait", "wrap",
}  # fmt: skip
"""Options of sbatch that drawbar writes itself, or with which its jobs do not work."""
RESERVED_SSH_OPTIONS = {
    "batchmode", "clearallforwardings", "controlmaster", "forkafterauthentication", "host", "localcommand", "match",
    "permitlocalcommand", "remotecommand", "requesttty", "sessiontype", "stdinnull",
}  # fmt: skip
"""Options of ssh, in small letters, that users cannot set: with them a launch would hang or leave something behind."""
FORWARDED = [
    "HF_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "WANDB_*", "MLFLOW_*", "TRACKIO_*", "NCCL_*", "GLOO_*",
    "TORCH_*", "PYTORCH_*", "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
]  # fmt: skip
"""Environment variables that ssh hosts get by default. Not CUDA_VISIBLE_DEVICES: each machine has its own GPUs."""


def _variables(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if SECRET.search(name):
            raise ValueError(
                f"{name} looks like a secret, and job scripts are no place for one; "
                "export it before `drawbar submit`: Slurm passes your environment on, and over ssh cluster.forward "
                "names what goes along"
            )
        if "\0" in value:
            raise ValueError(f"{name} holds a null character, which no environment variable can")
    return values


def _size(text: str) -> str:
    parse_size(text)
    return text


def _typed_gpus(text: str) -> str:
    if not _TYPED_GPUS.fullmatch(text):
        raise ValueError(f"expected a number of GPUs, or their type and number such as a100:4, got {text!r}")
    return text


def _sbatch_options(values: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    for name, value in values.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ValueError(f"{name!r} is no long option of sbatch; write it without its dashes, such as qos: high")
        if name in RESERVED_OPTIONS:
            raise ValueError(f"drawbar writes the option {name} itself, or its jobs do not work with it; leave it out")
        if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_./:,=@+&|*?!\[\]()<>-]+", value):
            raise ValueError(f"the value of {name} has characters that no option of sbatch needs: {value!r}")
        if name == "gres" and re.search(r"(^|,)gpu\b", str(value)):
            raise ValueError("GPUs are asked for by cluster.gpus_per_node, such as 4 or a100:4")
    return values


def _hosts(values: list[str]) -> list[str]:
    check_hosts(parse_host(value) for value in values)
    return values


def _ssh_options(values: dict[str, str | int]) -> dict[str, str | int]:
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", name):
            raise ValueError(f"{name!r} is no option of ssh; write it as in ssh's configuration, such as Port: 2222")
        if name.lower() in RESERVED_SSH_OPTIONS:
            raise ValueError(f"the option {name} cannot be set for a launch over ssh; leave it out")
        if isinstance(value, str) and (not value or not value.isprintable()):
            raise ValueError(f"expected a line of text as the value of {name}, got {value!r}")
    return values


def _lines(values: list[str]) -> list[str]:
    for line in values:
        if re.search(r"[\x00-\x08\x0a-\x1f]", line) or line.lstrip().startswith("#SBATCH"):
            raise ValueError(f"expected one shell command a line, got {line!r}")
    return values


class ClusterSection(GuestSection):
    """Where `drawbar submit` runs the job; `drawbar train` ignores it. A `--cluster` file has the same keys."""

    nodes: Count = 1
    """Machines that the job runs on."""
    gpus_per_node: Count | Annotated[str, AfterValidator(_typed_gpus)] | None = None
    """GPUs to request on each node, or their type and number, such as `a100:4`. Each gets one process, unless
    `launch.nproc` or `parallel.strategy` says otherwise."""
    gpu_memory: Annotated[Text, AfterValidator(_size)] | None = None
    """Memory of each GPU, such as `80GiB`. With this and `gpus_per_node`, `drawbar submit` plans the run as `drawbar
    plan` does and refuses what cannot fit (unless `preflight: false`); `--force` submits it anyway."""
    cpus_per_task: Count | None = None
    """CPU cores to request on each node, for all of its processes together: drawbar's Slurm jobs have one task per
    node, its launcher. Default: with GPUs, the same share of the node's CPU cores as of its GPUs; otherwise one per
    process."""
    partition: Name | None = None
    """Partition (queue) to submit to, or several, separated by commas."""
    account: Name | None = None
    """Account to charge."""
    time: TimeLimit | Count | None = None
    """Time limit in Slurm's notation, such as `12:00:00` or `2-00`; a whole number is minutes."""
    preflight: bool = True
    """Before submitting, check that the data exist, the run directory is writable, and the partition can run the job.
    Turn it off if the submitting machine does not see the nodes' disks."""
    requeue: bool = True
    """Requeue an interrupted job, which then resumes from its last checkpoint. A job that is restarted three times
    without a new checkpoint stops."""
    exclude_bad_nodes: bool = False
    """If a node does not answer, is lost or does not work, requeue the job without that node. It counts as a
    restart."""
    signal_seconds: Count = 120
    """Seconds before the time limit at which the run saves and ends, or is requeued. A run whose saves take longer
    warns at its first save."""
    modules: list[Module] = []
    """Environment modules to load, in this order."""
    environment: Annotated[dict[str, str], AfterValidator(_variables)] = {}
    """Environment variables to set on every node. Do not put secrets here: a Slurm job inherits your environment, and
    ssh hosts get the variables that `forward` names."""
    setup: Annotated[list[Text], AfterValidator(_lines)] = []
    """Shell commands to run first, such as `source ~/venv/bin/activate`: with Slurm on the first node, whose exported
    variables all nodes get; over ssh on each host."""
    python: PathText | None = None
    """Python interpreter on the nodes: a path, or a command that `setup` provides. Default: the one that submits; in a
    container, `python3`."""
    interface: Name | None = None
    """Network interface between the nodes. Default: InfiniBand if the first node has it, otherwise the one that leads
    to the first node."""
    image: ImageText | None = None
    """Container image to run the job in: a `.sif` file, a sandbox folder, `docker://NAME`, or for pyxis a `.sqsh` file
    or `REGISTRY#NAME`."""
    container: RuntimeOrAuto = "auto"
    """Container runtime. `auto`: pyxis for `.sqsh` files and names with `#`; otherwise Apptainer, or Singularity on a
    node without Apptainer."""
    binds: list[BindText] = []
    """Folders to mount in the container: `/folder`, `/outside:/inside` or `/outside:/inside:ro`. The current folder,
    `run.dir`, `data.cache`, `HF_HOME` and your home directory are always mounted."""
    home: PathText | None = None
    """Folder to use as your home directory inside the container (Apptainer and Singularity)."""
    options: Annotated[dict[str, str | int | bool], AfterValidator(_sbatch_options)] = {}
    """Further options of sbatch, without dashes, such as `{qos: high, mem: 0, exclusive: true}`; `gres` is for anything
    but GPUs, such as `{gres: "nvme:1"}`."""

    hosts: Annotated[list[Text], AfterValidator(_hosts)] = []
    """For `--to ssh`: the machines to run on with their number of processes, such as `[gpu1:8, gpu2:8]`; without a
    number, one per GPU. `--hosts` and `--hostfile` take precedence."""
    ssh_config: PathText | None = None
    """ssh's configuration file, if it is not `~/.ssh/config`."""
    ssh_options: Annotated[dict[str, str | int], AfterValidator(_ssh_options)] = {}
    """Further options of ssh, as in its configuration file, such as `{Port: 2222, User: me, ConnectTimeout: 30}`."""
    forward: list[Annotated[str, text_of("letters, digits and _, and a last *", r"^[A-Za-z_][A-Za-z0-9_]*\*?$")]] = (
        FORWARDED
    )
    """For `--to ssh`: which of your environment variables the hosts get, by name or by prefix, as in `HF_*`. They
    travel over the connection, never in a file or on a command line, so secrets may be among them."""
    workdir: PathText | None = None
    """For `--to ssh`: the folder to run in on each host, created if missing. Default: the same path as here."""

    @property
    def gpu_count(self) -> int | None:
        """GPUs of each node; None where none are asked for."""
        wanted = self.gpus_per_node
        return int(wanted.rpartition(":")[2]) if isinstance(wanted, str) else wanted

    @property
    def gpu_type(self) -> str | None:
        """The GPUs' type; None where any type will do."""
        return self.gpus_per_node.rpartition(":")[0] if isinstance(self.gpus_per_node, str) else None

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds."""
        return parse_time(self.time) if isinstance(self.time, str) else self.time and 60 * self.time


def profile_folder() -> Path:
    """Where profiles lie: ``$XDG_CONFIG_HOME/drawbar/clusters``, by default in ``~/.config``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "drawbar" / "clusters"


def read_profile(name: str) -> Settings:
    """The settings of a profile, as a section ``cluster``.

    Raises:
        UserError: there is no such profile, or it is no YAML file of keys and values.
    """
    folder = profile_folder()
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        guess = nearest(name, names)
        remedy = f"did you mean {guess}?" if guess else f"write {folder / f'{name}.yaml'} with lines such as `nodes: 2`"
        raise UserError(f"there is no cluster profile {name!r}", where=str(folder), remedy=remedy)
    profile = read_file(folder / f"{name}.yaml")
    if isinstance(profile.values.get("cluster"), dict):
        raise UserError(
            "a profile holds the keys of the section cluster without the word `cluster:`",
            where=str(profile.path),
            remedy="remove the line `cluster:`, and the indentation below it",
        )
    origins: dict[str, Origin] = {f"cluster.{key}": origin for key, origin in profile.origins.items()}
    return Settings(profile.path, {"cluster": profile.values}, origins, profile.problems)
