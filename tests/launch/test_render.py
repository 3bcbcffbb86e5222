"""The text of jobs: golden scripts, and words that a shell or sbatch could take for something else."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from drawbar.config.io.load_config import load_config
from drawbar.errors import UserError
from drawbar.jobs.job import Job
from drawbar.jobs.job_container import VARIABLES, make_container
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.slurm.batch_script import render
from drawbar.util.run_dir import job_config

GOLDEN = Path(__file__).parent / "golden"
JOB = Job(
    name="wikitext-gpt2",
    argv=("/opt/env/bin/python", "-m", "drawbar", "train"),
    workdir=Path("/home/me/project"),
    run_dir=Path("/home/me/project/runs/wikitext-gpt2"),
    config="run:\n  name: wikitext-gpt2\noptim:\n  lr: 0.0001\n",
    settings=("launch.nproc=1",),
)
EIGHT = replace(JOB, nodes=2, processes=8, settings=("launch.nproc=8",))
SWEEP = replace(
    JOB,
    elements=tuple(
        replace(
            JOB,
            name=f"wikitext-gpt2-lr{lr}",
            config=f"run:\n  name: wikitext-gpt2-lr{lr}\noptim:\n  lr: {lr}\n",
            run_dir=JOB.run_dir.with_name(f"wikitext-gpt2-lr{lr}"),
        )
        for lr in ("1e-4", "3e-4", "[1e-3]")
    ),
    at_once=2,
)


def in_container(*settings: str, environ: Mapping[str, str]) -> tuple[Job, ClusterSection]:
    """The job on two nodes with eight GPUs each, in a container."""
    given = ["cluster.nodes=2", "cluster.gpus_per_node=8", *(f"cluster.{setting}" for setting in settings)]
    config = load_config(None, [*given, "run.dir=/scratch/runs"]).config
    assert config.cluster is not None
    container = make_container(config, config.cluster, JOB.workdir, environ)
    job = replace(
        EIGHT,
        argv=("python3", *JOB.argv[1:]),
        run_dir=Path("/scratch/runs", JOB.name),
        container=container,
        environment=VARIABLES,
    )
    return job, config.cluster


SCRIPTS = {
    "plain": (JOB, ClusterSection()),
    "two_nodes": (
        replace(
            EIGHT,
            argv=("python", *JOB.argv[1:]),
            version="commit 0123456789ab with changes",
            snapshot=Path("/home/me/project/runs/wikitext-gpt2/launch/code-abc"),
        ),
        ClusterSection(
            nodes=2,
            gpus_per_node=8,
            cpus_per_task=64,
            partition="gpu",
            account="proj@h100",
            time="20:00:00",
            signal_seconds=300,
            modules=["cuda/12.4", "python/3.11"],
            environment={"HF_HOME": "/scratch/my cache", "NCCL_DEBUG": "WARN"},
            setup=['eval "$(conda shell.bash hook)"', "conda activate drawbar"],
            python="python",
            interface="ib0",
            options={"qos": "high", "exclusive": True, "mem": 0},
        ),
    ),
    "apptainer": in_container(
        "image=/images/my drawbar.sif",
        "binds=[/datasets:/datasets:ro, /scratch/me]",
        "home=/scratch/home",
        "modules=[apptainer]",
        "environment={NCCL_DEBUG: WARN}",
        environ={"HF_HOME": "/scratch/me/hub"},
    ),
    "singularity": in_container("image=docker://me/drawbar:1", "container=singularity", "python=python", environ={}),
    "pyxis": in_container(
        "image=nvcr.io#nvidia/pytorch:25.09-py3",
        "binds=[/datasets:/data:ro]",
        "environment={NCCL_DEBUG: WARN}",
        environ={"HF_HOME": "/home/me/project/hub"},
    ),
    "no_requeue": (JOB, ClusterSection(requeue=False, time=90)),
    "sweep": (SWEEP, ClusterSection(gpus_per_node=1, time="8:00:00")),
    "allocation": (replace(JOB, nodes=2, allocation="7"), ClusterSection(nodes=2, cpus_per_task=4, requeue=False)),
}
HOSTILE = [
    "two words", "it's", '"quoted"', "$(touch planted)", "`touch planted`", "a;touch planted", "a&touch planted",
    "a|touch planted", "a>planted", "a\ntouch planted", "a\n#SBATCH --wrap=planted", "$HOME", "${PATH}", "~", "*", "?",
    "[a-z]", "!!", "#", "a\\", "\\n", "-rf", "--help", "{a,b}", "(touch planted)", "é", "%j", "\t",
    "'; touch planted '", "", "\x85", "\r",
]  # fmt: skip


def script_of(name: str) -> str:
    job, cluster = SCRIPTS[name]
    return render(replace(job, cluster=cluster))


@pytest.mark.parametrize("name", SCRIPTS)
def test_golden_scripts(name: str) -> None:
    assert script_of(name) == (GOLDEN / f"{name}.sh").read_text(), f"golden/{name}.sh: compare, and replace"


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_good_bash(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script_of(name), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here: apt-get install shellcheck")
@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name: str) -> None:
    done = subprocess.run(
        ["shellcheck", "--exclude=SC1090,SC1091", "-"],  # what a user's `source` would read is not here
        input=script_of(name),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with programs that stand for Slurm's: the last srun runs its command, and prints each argument."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
        "scontrol": 'case "$*" in *hostnames*) echo n1;; *) echo "NodeName=n1 NodeAddr=127.0.0.1 Port=1";; esac',
        "srun": 'case "$*" in *first_node*) echo 127.0.0.1:20000;; '
        '*) printf %s "$DRAWBAR_CONFIG" > config; printf "%s\\0" "$@" > "$ARGUMENTS";; esac',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("is_sweep", [False, True])
def test_hostile_words_arrive_as_they_are(tmp_path: Path, tools: Path, is_sweep: bool) -> None:
    """Through a real bash, as arguments, as values of the environment, and as the name of a folder."""
    where = tmp_path / "where"
    where.mkdir()
    python = tmp_path / "it's $(touch planted) python"
    python.symlink_to(sys.executable)
    run_dir, text = where / "$(touch planted)'\" x", "\n".join(HOSTILE)
    job = replace(JOB, argv=(str(python),), config=text, settings=tuple(HOSTILE), run_dir=run_dir, workdir=where)
    variables = {f"HOSTILE_{number}": word for number, word in enumerate(HOSTILE)}
    other = replace(job, settings=("--other",), run_dir=where / "other")
    whole = replace(other, elements=(other, job)) if is_sweep else job
    cluster = ClusterSection(environment=variables, setup=["env --null > environment"])
    script = render(replace(whole, cluster=cluster))
    arguments = tmp_path / "arguments"
    environ = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "ARGUMENTS": str(arguments),
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_NODELIST": "n1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(["bash"], input=script, cwd=where, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    # what srun got: options, python -m drawbar.jobs.node.each_node RENDEZVOUS CONFIG, and the command
    number = "7_1" if is_sweep else "7"
    config = str(job_config(job.run_dir, number))
    command = [config, str(python), config, *HOSTILE]
    assert arguments.read_bytes().decode().split("\0")[-len(command) - 1 : -1] == command
    assert base64.b64decode((where / "config").read_bytes()).decode() == text
    found = dict(
        line.split("=", 1) for line in (where / "environment").read_bytes().decode().split("\0") if "=" in line
    )
    assert {name: found[name] for name in variables} == variables
    assert (job.run_dir / "launch" / f"restarts-{number}.json").is_file()
    end = json.loads((job.run_dir / "launch" / f"ended-{number}.json").read_text())
    assert (end["code"], end["restarts"]) == (0, 2)
    assert end["time"] > 1e9
    assert not other.run_dir.exists()
    assert list(tmp_path.rglob("planted")) == []


@pytest.mark.parametrize("name", ["", "-rf", "a b", "a\nb", "$(x)", "a;b", "é", "a/b", "'"])
def test_names_that_no_job_can_have(name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name of a job"):
        render(replace(JOB, name=name))


@pytest.mark.parametrize("folder", ["a\nb", "a\\b", "a\tb", "a\x7f"])
def test_folders_that_sbatch_would_misread(folder: str) -> None:
    for job in (replace(JOB, workdir=Path("/", folder)), replace(JOB, run_dir=Path("/", folder))):
        with pytest.raises(UserError, match="backslashes or control characters"):
            render(job)


@pytest.mark.parametrize("word", [word for word in HOSTILE if word != "é"])
@pytest.mark.parametrize("key", ["partition", "account", "modules", "interface"])
def test_names_on_the_cluster_are_names(key: str, word: str) -> None:
    if word in ("~", "{a,b}"):
        word = f"{word} x"
    value = f"[{json.dumps(word)}]" if key == "modules" else json.dumps(word)
    with pytest.raises(UserError, match=f"cluster.{key}"):
        load_config(None, [f"cluster.{key}={value}"])
