"""What ``drawbar submit --to ssh`` would run, as text; and words that a shell could take for something else."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_render import GOLDEN, HOSTILE

import drawbar
from apptainer_stand_in import calls, install, make_image
from drawbar.config.io.load_config import load_config
from drawbar.errors import UserError
from drawbar.jobs.hosts_file import Host, parse_hosts
from drawbar.jobs.job import Job
from drawbar.jobs.node.ssh_host import address_for
from drawbar.jobs.settings import FORWARDED, ClusterSection
from drawbar.jobs.ssh.protocol import ANSWER, HostJob, host_message, submitter_message
from drawbar.jobs.ssh.ssh_command import describe, forwarded, remote_starts
from drawbar.jobs.ssh.ssh_launcher import SshLauncher
from drawbar.jobs.ssh.supervisor import supervise
from harness import run_cli
from messages import check_one_message
from programs import need_programs
from sshd import Sshd

CONFIG = "run:\n  name: wikitext-gpt2\n\ntrain:\n  steps: 100\n"
JOB = Job(
    name="wikitext-gpt2",
    argv=("/opt/env/bin/python", "-m", "drawbar", "train"),
    workdir=Path("/home/me/project"),
    run_dir=Path("/home/me/project/runs/wikitext-gpt2"),
    config=CONFIG,
    environment={"HF_TOKEN": "hf_canary", "NCCL_DEBUG": "INFO"},
)
CLUSTER = ClusterSection(
    modules=["cuda/12.4"],
    environment={"HF_HOME": "/scratch/my cache"},
    setup=["source ~/venv/bin/activate"],
    ssh_config="/home/me/lab ssh",
    ssh_options={"Port": 2222},
    interface="ib0",
)
TEXTS = {"ssh": (JOB, CLUSTER, "gpu1:8,me@gpu2:8"), "ssh_plain": (JOB, ClusterSection(), "gpu1:8")}


def text(name: str) -> str:
    job, cluster, hosts = TEXTS[name]
    return describe(job.name, remote_starts(replace(job, cluster=cluster), parse_hosts(hosts)))


@pytest.mark.parametrize("name", TEXTS)
def test_golden_texts(name: str) -> None:
    assert text(name) == (GOLDEN / f"{name}.sh").read_text(), f"golden/{name}.sh: compare, and replace"


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_good_bash(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text(name), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    need_programs("shellcheck")
    command = ["shellcheck", "--shell=bash", "--exclude=SC1090,SC1091", "-"]
    done = subprocess.run(command, input=text(name), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_dry_run_starts_nothing_and_shows_no_secret(project: Path) -> None:
    environ = {"HF_TOKEN": "canary", "PATH": "/nowhere", "CUDA_VISIBLE_DEVICES": "0"}
    done = run_cli("submit", "config.yaml", "--hosts", "gpu1:2,gpu2:2", "train.micro_batch=2", "--dry-run",
                   cwd=project, env=environ)  # fmt: skip
    assert done.code == 0, done.err
    assert '"HF_TOKEN": "***"' in done.out
    assert "canary" not in done.out
    assert "CUDA_VISIBLE_DEVICES" not in done.out
    assert "#   nproc: 2" in done.out
    assert not (project / "runs").exists()
    done = run_cli("submit", "config.yaml", "--hosts", "gpu1:1", cwd=project, env=environ)
    assert done.code == 2
    check_one_message(done.err, "there is no ssh here")
    for wrong in (
        ["--hosts", "a", "--to", "slurm"],
        ["--hosts", "a", "--hostfile", "b"],
        ["--to", "ssh", "--nodes", "2"],
    ):
        done = run_cli("submit", "config.yaml", *wrong, cwd=project)
        assert done.code == 2
        assert "exclude one another" in done.err
    assert "say where to run it" in run_cli("submit", "config.yaml", cwd=project).err


def test_what_is_forwarded() -> None:
    environ = {"HF_TOKEN": "a", "WANDB_API_KEY": "b", "NCCL_DEBUG": "c", "PATH": "d", "CUDA_VISIBLE_DEVICES": "e",
               "MY_HF_TOKEN": "f", "HF_HOME": "g"}  # fmt: skip
    assert forwarded(FORWARDED, environ, ["HF_HOME"]) == {"HF_TOKEN": "a", "NCCL_DEBUG": "c", "WANDB_API_KEY": "b"}
    assert forwarded(["PATH", "MY_*", "NONE"], environ, []) == {"MY_HF_TOKEN": "f", "PATH": "d"}


def test_jobs_arrive_as_they_are() -> None:
    job = replace(JOB, workdir=Path("/odd\udcff"), argv=tuple(HOSTILE), cluster=CLUSTER)
    sent = remote_starts(job, [Host("a")])[0].host_job
    assert HostJob.from_json(json.loads(sent.message())["job"]) == sent
    assert submitter_message(endpoint="a:1") == ANSWER + host_message(endpoint="a:1")


def test_the_address_of_the_first_host() -> None:
    assert address_for([], "127.0.0.1", "127.0.0.1") == "127.0.0.1"
    assert address_for(["127.0.0.1", "::1"], "127.0.0.1", "127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match=r"Name or service not known|not supported"):
        address_for(["fe80::1"], "10.0.0.1", "10.0.0.2")  # the nodes meet over IPv4


def test_code_does_not_travel(sshd: Sshd, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = str(Path(drawbar.__file__).parents[1])
    cluster = ClusterSection(ssh_config=str(sshd.config), environment={"PYTHONPATH": source})
    job = Job("job", (sys.executable, "/no/such/my_task.py", "train"), tmp_path, tmp_path, cluster=cluster)
    assert supervise(remote_starts(job, [Host("gpu1")]), 60) == 2
    check_one_message(
        capfd.readouterr().err.replace("gpu1: ", ""), "this host has no file /no/such/my_task.py", "copy your program"
    )


def test_a_container_on_a_host(sshd: Sshd, tmp_path: Path) -> None:
    """drawbar's own program on the host runs inside, too; with a program that stands for Apptainer."""
    image = make_image(tmp_path / "it's $(touch planted).sif")
    settings = {
        "image": str(image),
        "ssh_config": str(sshd.config),
        "environment": {"PYTHONPATH": str(Path(drawbar.__file__).parents[1])},
        "setup": [f"export PATH={install(tmp_path / 'bin')}:$PATH"],
        "workdir": str(tmp_path),
    }
    config = load_config(None, [f"cluster.{key}={json.dumps(value)}" for key, value in settings.items()]).config
    assert config.cluster is not None
    job = SshLauncher().make_job(config, config.cluster, None)
    assert job.argv == ("python3", "-m", "drawbar", "train")
    show = "import os; open('found', 'w').write(os.environ['IMAGE'])"
    starts = remote_starts(replace(job, argv=("python3", "-c", show)), [Host("gpu1")])
    assert supervise(starts, 60) == 0
    assert (tmp_path / "found").read_text() == image.name
    assert [call["command"][:4] for call in calls(image)] == [["python3", "-P", "-m", "drawbar.jobs.node.ssh_host"]]
    pyxis = load_config(None, ["cluster.image=registry#image"]).config
    assert pyxis.cluster is not None
    with pytest.raises(UserError, match="pyxis is a part of Slurm"):
        SshLauncher().make_job(pyxis, pyxis.cluster, None)


PROGRAM = "import json, os, sys; json.dump([sys.argv[1:-1], dict(os.environ), os.getcwd()], open(sys.argv[1], 'w'))"


def test_hostile_words_arrive_as_they_are(sshd: Sshd, tmp_path: Path) -> None:
    """Through a real ssh and a real shell there: as arguments, values of the environment, names of folders."""
    python = tmp_path / "it's $(touch planted) python"
    python.symlink_to(sys.executable)
    workdir = tmp_path / "$(touch planted)'\" x" / "`touch planted`"
    found = tmp_path / "found.json"
    values = {f"HOSTILE_{number}": word for number, word in enumerate(HOSTILE)}
    sent = {f"SENT_{number}": word for number, word in enumerate(HOSTILE)}
    source = str(Path(drawbar.__file__).parents[1])
    cluster = ClusterSection(
        ssh_config=str(sshd.config),
        environment={**values, "PYTHONPATH": source},
        setup=[f"cat > {tmp_path}/stolen", "export MADE='by setup'"],
    )
    config = "a: $(touch planted)\n"
    argv = (str(python), "-c", PROGRAM, str(found), *HOSTILE)
    job = Job("job", argv, workdir, tmp_path, config, cluster, environment=sent)
    assert supervise(remote_starts(job, [Host("gpu1")]), 60) == 0
    arguments, environ, folder = json.loads(found.read_text())
    assert arguments == [str(found), *HOSTILE]
    expected = {**values, **sent, "MADE": "by setup"}
    assert {name: environ.get(name) for name in expected} == expected
    assert folder == str(workdir)
    assert list(tmp_path.rglob("planted")) == []
    assert not (Path.home() / "planted").exists()
    assert (tmp_path / "stolen").read_text() == ""  # what followed was not for the commands of `setup`
