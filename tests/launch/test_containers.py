"""Jobs in containers: what is bound, what is refused, and hostile words on their way into one."""

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from test_render import HOSTILE, JOB

from apptainer_stand_in import calls, install, make_image
from drawbar.config.io.load_config import load_config
from drawbar.errors import UserError
from drawbar.jobs.job_container import VARIABLES, Container, check_image, make_container
from drawbar.jobs.settings import INVALID_IN_BIND, ClusterSection, choose_runtime
from drawbar.jobs.slurm.batch_script import render
from drawbar.util.run_dir import job_config
from harness import run_cli
from messages import check_one_message

NO_HUB: dict[str, str] = {}


def contain(workdir: Path, *settings: str, environ: dict[str, str] = NO_HUB) -> Container:
    config = load_config(None, ["cluster.image=x.sif", *settings]).config
    assert config.cluster is not None
    container = make_container(config, config.cluster, workdir, environ)
    assert container is not None
    return container


@pytest.mark.parametrize(
    ("image", "runtime"),
    [
        ("x.sif", "apptainer"), ("/images/sandbox", "apptainer"), ("/images/a#b.sif", "apptainer"),
        ("docker://me/drawbar:1", "apptainer"), ("oras://x/y", "apptainer"), ("nvcr.io#nvidia/pytorch", "pyxis"),
        ("docker://nvcr.io#nvidia/pytorch", "pyxis"), ("x.sqsh", "pyxis"),
    ],
)  # fmt: skip
def test_who_runs_an_image(image: str, runtime: str) -> None:
    assert choose_runtime(image, "auto") == runtime
    assert choose_runtime(image, "singularity") == "singularity"


def test_what_a_container_sees(tmp_path: Path) -> None:
    """The current folder, the runs, the cache and the hub's files, also where links lead out of a bound folder."""
    for name in ("project", "scratch/runs", "scratch/hub"):
        (tmp_path / name).mkdir(parents=True)
    workdir, scratch = tmp_path / "project", tmp_path / "scratch"
    assert contain(workdir).binds == (f"{workdir}:{workdir}",)
    assert contain(workdir).image == f"{workdir}/x.sif"
    (workdir / "runs").symlink_to(scratch / "runs")
    assert contain(workdir).binds == (f"{workdir}:{workdir}", f"{scratch}/runs:{scratch}/runs")
    found = contain(
        workdir,
        f"data.cache={scratch}/cache",
        "cluster.binds=[/data:/data:ro, /usr]",
        environ={"HF_HOME": f"{scratch}/hub", "HF_HUB_CACHE": f"{scratch}/hub/other"},
    )
    own = (f"{path}:{path}" for path in (workdir, scratch / "cache", scratch / "hub", scratch / "runs"))
    assert set(found.binds) == {"/data:/data:ro", "/usr:/usr", *own}
    assert list(found.binds) == sorted(found.binds)  # a folder before what lies in it
    assert found.made == (f"{scratch}/cache", f"{scratch}/hub")


def test_gpus_are_taken_in_where_they_are_asked_for(tmp_path: Path) -> None:
    for settings, wanted in {
        (): False,
        ("cluster.options={exclusive: true}",): False,
        ("cluster.gpus_per_node=2",): True,
        ("cluster.options={gpus-per-task: 2}",): True,
        ("device=cuda",): True,
    }.items():
        assert ("--nv" in contain(tmp_path, *settings).options()) is wanted


def test_files_that_a_container_would_not_see(tmp_path: Path) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    for folder in (project, other):
        folder.mkdir()
        (folder / "train.txt").touch()
    (project / "link.txt").symlink_to(other / "train.txt")
    for source in (f"{other}/train.txt", "link.txt", "../other/train.txt"):
        with pytest.raises(UserError, match="outside of the folders that the container sees") as caught:
            contain(project, f"data.train={source}")
        assert caught.value.remedy == f"set cluster.binds=[{other}]"
        contain(project, f"data.train={source}", f"cluster.binds=[{other}]")
    contain(project, "data.train=train.txt")
    contain(project, "task.model=somebody/model", "data.train=/nowhere/train.txt")  # names, or files of the image


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("binds=[data]", "absolute paths"),
        ("binds=['/a,/b']", "absolute paths"),
        ("binds=['/a^b']", "absolute paths"),
        ("binds=['/a:b']", "absolute paths"),
        ("binds=['/a:/b:rx']", "expected ro, rw or nothing"),
        ("binds=['/a:/b:ro:/c']", "expected ro, rw or nothing"),
        ('binds=["/a\\nb"]', "absolute paths"),
        ("image=''", "cluster.image"),
        ("image=--help", "is the name of no image"),
        ('image="a\\nb"', "is the name of no image"),
        ("container=docker", "cluster.container"),
    ],
)
def test_settings_that_are_refused(setting: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_config(None, [f"cluster.{setting}"])


@pytest.mark.parametrize("name", ["a,b", "a:b", "a^b", "a\\b", "a "])
def test_folders_that_cannot_be_bound(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no container can be given this path"):
        contain(tmp_path / name)
    with pytest.raises(UserError, match="no container can be given this path"):
        contain(tmp_path, f"cluster.home={json.dumps(name)}")
    with pytest.raises(UserError, match="an image cannot have this path"):
        contain(tmp_path, f"cluster.image={json.dumps(str(tmp_path / name))}")
    contain(tmp_path, f"run.dir={json.dumps(str(tmp_path / name))}")  # in a folder that is bound


def test_an_image_that_is_not_there(project: Path) -> None:
    done = run_cli("submit", "config.yaml", "--to", "slurm", "--image", "x.sif", cwd=project, env={"PATH": "/nowhere"})
    assert done.code == 2
    check_one_message(done.err, f"there is no image {project}/x.sif", "docker://NAME")
    assert not (project / "runs").exists()
    check_image(contain(project, "cluster.image=docker://x.sif"))


def run_bash(script: str, folder: Path, srun: str) -> None:
    """Run a job's script with programs that stand for Slurm's and Apptainer's; it must end well, and silently."""
    tools = install(folder / "bin")
    for name, text in {
        "scontrol": 'case "$*" in *hostnames*) echo n1;; *) echo "NodeName=n1 NodeAddr=127.0.0.1 Port=1";; esac',
        "srun": f"while [[ $1 == --[!c]* ]]; do shift; done\n{srun}",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NODEID": "0",
    }
    done = subprocess.run(["bash"], input=script, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.rglob("planted")) == []


def hostile_job(tmp_path: Path, image: str, *argv: str) -> tuple[str, list[str], dict[str, str], Path]:
    """The script of a job whose folders, binds and variables are hostile; its binds, variables and folder."""
    where = tmp_path / "it's $(touch planted) %j; #1"
    where.mkdir()
    variable = re.compile(r"\$[\w{]")  # whose value takes its place when the configuration is read
    names = [word for word in HOSTILE if word and not INVALID_IN_BIND.search(word) and not variable.search(word)]
    assert len(names) > 20
    binds = [f"{tmp_path}/bound {word}:/inside {word}" for word in names]
    for bind in binds:
        Path(bind.partition(":")[0]).mkdir()
    variables = {f"HOSTILE_{number}": word for number, word in enumerate(HOSTILE)}
    settings = {"cluster.image": image, "cluster.binds": binds, "cluster.environment": variables}
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()]).config
    cluster = config.cluster or ClusterSection()
    container = make_container(config, cluster, where, {"HF_HOME": str(where / "$(touch planted)")})
    run_dir = where / "runs" / "x"
    job = replace(JOB, argv=argv, settings=tuple(HOSTILE), config=HOSTILE[0], workdir=where, run_dir=run_dir)
    job = replace(job, cluster=cluster, container=container, environment=VARIABLES)
    return render(job), binds, {**variables, **VARIABLES}, where


def test_hostile_words_arrive_in_a_container(tmp_path: Path) -> None:
    """All the way: bash, srun, apptainer, the node's part of the launcher, and a program in the working folder."""
    image = make_image(tmp_path / "it's $(touch planted).sif")
    show = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], open('found', 'w'))"
    script, binds, variables, where = hostile_job(tmp_path, str(image), "python3", "-c", show)
    run_bash(script, tmp_path, '"$@"')
    (config, *arguments), environ, folder = json.loads((where / "found").read_text())
    assert (arguments, folder) == (HOSTILE, str(where))
    assert Path(config).read_text() == HOSTILE[0]
    assert {name: environ[name] for name in variables} == variables
    assert environ["IMAGE"] == image.name
    modules = []
    for call in calls(image):
        options, command = call["options"], call["command"]
        assert isinstance(options, dict)
        assert isinstance(command, list)
        assert set(binds) < set(options["--bind"])
        modules.append(command[2])
    assert modules == [f"drawbar.jobs.node.{name}" for name in ("restart", "first_node", "each_node")]


def test_hostile_words_arrive_at_pyxis(tmp_path: Path) -> None:
    found = tmp_path / "found"
    image = "me@registry#it's $(touch planted)"
    script, binds, variables, where = hostile_job(tmp_path, image, "python3")
    report = f'case "$*" in *first_node*) echo 127.0.0.1:20000;; esac; printf \'%s\\0\' "$@" > {found}'
    run_bash(script, tmp_path, report)
    words = found.read_bytes().decode().split("\0")[:-1]
    own = f"{where}:{where}"
    assert words[:5] == [
        f"--container-image={image}",
        f"--container-mounts={','.join(sorted([*binds, own], key=lambda bind: bind.split(':')[1]))}",
        f"--container-workdir={where}",
        "--container-mount-home",
        f"--container-env={','.join(sorted(variables, key=lambda name: name not in VARIABLES))}",
    ]
    config = str(job_config(where / "runs" / "x", "7"))
    assert words[-len(HOSTILE) - 3 :] == [config, "python3", config, *HOSTILE]


def test_a_node_without_apptainer(tmp_path: Path) -> None:
    script, *_ = hostile_job(tmp_path, "x.sif", "python3")
    done = subprocess.run(
        ["/bin/bash"], input=script, env={"PATH": "/bin"}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    check_one_message(done.stderr, "there is no apptainer or singularity on the node", "cluster.modules")
