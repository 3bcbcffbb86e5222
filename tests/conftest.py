"""Fixtures that every test may use."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import drawbar  # noqa: F401 - before torch: it says how torch's threads wait, to all processes of the tests

if TYPE_CHECKING:
    from faulty_disk import FaultyDisk
    from object_server import ObjectServer
    from runs import Fit
    from slurm_cluster import SlurmCluster
    from sshd import Sshd

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors, and two workers: threads would only wait for one another
sys.path.insert(0, str(Path(__file__).parent))  # for `import harness`, in the processes it starts too

# property tests never fail for being slow: the machine may be busy
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

WORDS = """
the driver couples the load to the engine and the engine pulls the load along the road while the road bends around
the hill and the hill keeps the wind from the village where the driver was born
""".split()  # noqa: SIM905 - a sentence is easier to read than a list


def write_text(path: Path, lines: int, seed: int = 0) -> Path:
    """A text file of ``lines`` lines of very different lengths."""
    state = seed * 7919 + 17
    rows = []
    for _ in range(lines):
        words = []
        state = (state * 1103515245 + 12345) % 2**31
        for _ in range(1 + state % 37):
            state = (state * 1103515245 + 12345) % 2**31
            words.append(WORDS[(state >> 8) % len(WORDS)])
        rows.append(" ".join(words))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def pytest_collection_finish() -> None:
    """What is imported by now stays to the end: no garbage collection need look at it."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The list of submitted jobs is not that of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _logger_propagates() -> None:
    """``caplog`` hears drawbar, once, though an earlier test of this process has started a run's logging."""
    logging.getLogger("drawbar").propagate = True


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    """A test that fails leaves no ``drawbar`` behind: other tests look at the children of this process."""
    yield
    if harness := sys.modules.get("harness"):
        harness.kill_started()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """See :func:`make_project`."""
    return make_project(tmp_path)


@pytest.fixture
def fit(project: Path) -> "Fit":
    """Train the tiny project: see :func:`runs.fit_in`."""
    from runs import fit_in  # here, so that tests without a run need not wait for torch

    return partial(fit_in, project)


@pytest.fixture
def run(project: Path) -> Path:
    """The directory of the run that ``fit`` makes."""
    return project / "runs" / "tiny"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SlurmCluster]":
    """A real Slurm of two nodes: see :mod:`slurm_cluster`."""
    from programs import need_programs
    from slurm_cluster import PROGRAMS, start_cluster, stop_cluster

    need_programs(*PROGRAMS)
    cluster = start_cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    stop_cluster(cluster)


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Sshd]":
    """A real sshd with two names: see :mod:`sshd`."""
    from programs import need_programs
    from sshd import PROGRAMS, start_sshd, stop_sshd

    need_programs(*PROGRAMS)
    server = start_sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    stop_sshd(server)


@pytest.fixture(scope="module")
def frail_slurm(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SlurmCluster]":
    """Another one, of three nodes, for tests that kill them."""
    from programs import need_programs
    from slurm_cluster import PROGRAMS, start_cluster, stop_cluster

    need_programs(*PROGRAMS)
    cluster = start_cluster(tmp_path_factory.mktemp("frail"), nodes=("n1", "n2", "n3"), patience=15)
    yield cluster
    stop_cluster(cluster)


@pytest.fixture(scope="module")
def server() -> "Iterator[ObjectServer]":
    """A real S3 server: see :mod:`object_server`."""
    from object_server import ObjectServer

    server = ObjectServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[FaultyDisk]":
    """A disk that fails: see :mod:`faulty_disk`."""
    from faulty_disk import FaultyDisk

    with FaultyDisk(tmp_path_factory.mktemp("disk")) as disk:
        yield disk


def make_project(folder: Path) -> Path:
    """A folder with a tiny configuration (a two-layer Llama) and its data: trains a step in milliseconds."""
    write_text(folder / "train.txt", 90, seed=1)
    write_text(folder / "valid.txt", 17, seed=2)
    (folder / "config.yaml").write_text(TINY, encoding="utf-8")
    return folder


TINY = """\
run: {name: tiny}
task:
  model: llama
  from_scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
                 num_key_value_heads: 2, max_position_embeddings: 64}
  tokenizer: {train: byte_bpe, vocab_size: 300}
data: {train: train.txt, validation: valid.txt, sequence_length: 32}
train: {global_batch: 8, micro_batch: 4, steps: 12}
optim: {lr: 1.0e-2, warmup: 2}
precision: fp32
device: cpu
eval: {every: 5}
checkpoint: {every: 4}
tracking: {log_every: 1, tensorboard: false}
"""
