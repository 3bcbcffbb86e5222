"""What is looked at before a job waits in a queue."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import make_project
from drawbar.errors import UserError
from drawbar.jobs.job import Job
from drawbar.jobs.node.requeue import GAVE_UP, NO_BAD_NODES, requeue
from drawbar.jobs.preflight import check_run_folder
from drawbar.jobs.settings import ClusterSection
from drawbar.jobs.slurm.obstacles import find_obstacles, fitting_nodes
from drawbar.jobs.slurm.queries import (
    Partition,
    SlurmNode,
    count_gpus,
    facts,
    parse_time,
    read_nodes,
    read_partitions,
    write_time,
)
from drawbar.launch.findings import record_bad_nodes
from harness import Finished, run_cli
from messages import check_one_message
from slurm_cluster import SlurmCluster

JOB = Job("tiny", ("python",), Path("/x"), Path("/x/runs/tiny"), nodes=2)
GPU = Partition("gpu", False, "UP", 86400, 4, 64, ("physics", "chemistry"), ())
NODES = [*(SlurmNode(f"g{number}", 64, "gpu:a100:8", "idle") for number in range(3)),
         SlurmNode("c1", 128, "(null)", "down*")]  # fmt: skip


def obstacles(partition: Partition = GPU, nodes: int = 2, **settings: object) -> list[tuple[str, str, str]]:
    cluster = ClusterSection.model_validate({"account": "physics", **settings})
    job = Job("tiny", ("python",), Path("/x"), Path("/x/runs/tiny"), nodes=nodes)
    return [(found.where, found.what, found.remedy) for found in find_obstacles(partition, NODES, job, cluster)]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("01:00:00", 3600), ("2-12:00:00", 216000), ("1-00", 86400), ("90", 5400), ("5:30", 330), ("UNLIMITED", None)],
)
def test_times_of_slurm(written: str, seconds: int | None) -> None:
    assert parse_time(written) == seconds
    if seconds is not None:
        assert parse_time(write_time(seconds)) == seconds


@pytest.mark.parametrize(
    ("written", "count"),
    [("(null)", 0), ("gpu:8", 8), ("gpu:a100:4(S:0-1),nvme:1", 4), ("gpu:a100:4(S:0,1),gpu:h100:2(IDX:0-1)", 6),
     ("gpu:a100_1g.5gb:7", 7), ("craynetwork:4,mps:400", 0)],
)  # fmt: skip
def test_gpus_of_a_node(written: str, count: int) -> None:
    assert count_gpus(written) == count


def test_gpus_of_a_type() -> None:
    assert [count_gpus("gpu:a100:4(S:0,1),gpu:h100:2,gpu:1", kind) for kind in ("a100", "h100", "v100")] == [4, 2, 0]


def test_lines_of_scontrol() -> None:
    line = "NodeName=n1 OS=Linux 6.1 #1 SMP @0 State=DOWN Reason=Not responding [slurm@2026] Gres=(null) "
    found = facts(line)
    assert found["OS"] == "Linux 6.1 #1 SMP @0"
    assert (found["State"], found["Reason"], found["Gres"]) == ("DOWN", "Not responding [slurm@2026]", "(null)")


def test_jobs_that_a_partition_can_run() -> None:
    assert obstacles() == []
    assert obstacles(nodes=3, time="1-00", gpus_per_node=8, cpus_per_task=64) == []
    assert obstacles(nodes=3, gpus_per_node="a100:8") == []
    assert obstacles(time="2-00", options={"qos": "long"}) == []  # which may allow it


@pytest.mark.parametrize(
    ("settings", "setting", "what", "remedy"),
    [
        ({"time": "2-00"}, "cluster.time", "gpu allows no job of 2-00:00:00", "cluster.time=1-00:00:00"),
        ({"nodes": 5}, "cluster.nodes", "gpu gives no job 5 nodes", "cluster.nodes=4"),
        ({"gpus_per_node": 16}, "cluster.gpus_per_node", "has 16 GPUs: the most is 8", "cluster.gpus_per_node=8"),
        ({"gpus_per_node": "a100:9"}, "cluster.gpus_per_node", "9 a100 GPUs: the most is 8", "gpus_per_node=a100:8"),
        ({"gpus_per_node": "h100:1"}, "cluster.gpus_per_node", "1 h100 GPUs: it has none", "another cluster.partition"),
        ({"cpus_per_task": 96}, "cluster.cpus_per_task", "has 96 CPUs: the most is 64", "cluster.cpus_per_task=64"),
        ({"nodes": 4, "gpus_per_node": 1}, "cluster.nodes", "3 nodes with 1 GPUs, not 4", "cluster.nodes=3"),
        ({"account": "biology"}, "cluster.account", "does not take jobs of the account biology", "physics, chemistry"),
    ],
)  # fmt: skip
def test_jobs_that_it_cannot_run(settings: dict[str, object], setting: str, what: str, remedy: str) -> None:
    found = obstacles(nodes=int(str(settings.pop("nodes", 2))), **settings)
    assert found[0][0] == setting
    assert what in found[0][1]
    assert remedy in found[0][2]


def test_a_partition_that_is_down() -> None:
    down = Partition("old", False, "DRAIN", None, None, None, None, ("physics",))
    assert [setting for setting, *_ in obstacles(down)] == ["cluster.partition", "cluster.account"]
    assert [node.name for node in fitting_nodes(NODES, ClusterSection(cpus_per_task=100))] == ["c1"]
    assert [node.is_away for node in NODES] == [False, False, False, True]


def test_room_for_a_run(tmp_path: Path) -> None:
    assert check_run_folder(tmp_path / "runs" / "tiny") == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        check_run_folder(tmp_path / "file" / "tiny")
    checkpoint = tmp_path / "tiny" / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    os.truncate(
        os.open(checkpoint / "model-00000.safetensors", os.O_WRONLY | os.O_CREAT), 2**42
    )  # a hole: takes no room
    with pytest.raises(UserError, match=r"nearly full: .*, 4096.0 GiB needed"):
        check_run_folder(tmp_path / "tiny")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tiny"]


def submit(project: Path, *arguments: str, env: dict[str, str] | None = None) -> Finished:
    return run_cli("submit", "config.yaml", "--to", "slurm", *arguments, cwd=project, env=env)


def test_data_that_are_not_there(project: Path) -> None:
    done = submit(project, "--dry-run", "data.train=trian.txt")
    assert (done.code, done.out) == (2, "")
    check_one_message(done.err, "there is no file trian.txt", "did you mean train.txt")
    done = submit(project, "--dry-run", "data.validation=none/*.jsonl")
    assert done.code == 2
    check_one_message(done.err, "no file matches none/*.jsonl", "data.validation")
    done = submit(project, "--dry-run", "data.train=trian.txt", "cluster.preflight=false")
    assert done.code == 0, done.err

    done = submit(project, "--dry-run")
    assert (done.code, done.out[:11]) == (0, "#!/bin/bash")
    assert done.err == "note: the job will encode its data first (train, validation); `drawbar prepare` does it here\n"
    assert run_cli("prepare", "config.yaml", cwd=project).code == 0
    done = submit(project, "--dry-run", "data.streaming=true")
    assert done.err.startswith("note: runs/.cache has encoded data (validation); where they are of other settings")


def test_submitting_needs_no_torch(project: Path) -> None:
    script = (
        "import sys; from drawbar.cli import group\n"
        "group.main(['submit', 'config.yaml', '--to', 'slurm', '--dry-run'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_the_real_slurm_says(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    assert read_partitions() == [Partition("main", True, "UP", 3600, None, None, None, ())]
    assert [(node.name, node.cpus, node.gpus, node.is_away) for node in read_nodes("main") or []] == [
        ("n1", 8, 0, False),
        ("n2", 8, 0, False),
    ]
    monkeypatch.setenv("PATH", "/nowhere")
    assert read_partitions() is None
    assert read_nodes("main") is None


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("cluster.partition=mian", ["there is no partition mian", "did you mean main?"]),
        ("cluster.time=2:00:00", ["main allows no job of 02:00:00", "cluster.time=01:00:00"]),
        ("cluster.nodes=4", ["main has 2 nodes, not 4", "cluster.nodes=2"]),
        ("cluster.cpus_per_task=9", ["no node of main has 9 CPUs: the most is 8", "cluster.cpus_per_task=8"]),
        ("cluster.gpus_per_node=1", ["no node of main has 1 GPUs: it has none at all", "another cluster.partition"]),
    ],
)
def test_the_real_slurm_could_never_run_it(slurm: SlurmCluster, project: Path, setting: str, says: list[str]) -> None:
    for dry in ([], ["--dry-run"]):
        done = submit(project, setting, "device=auto", "train.micro_batch=1", *dry, env=slurm.environment)
        assert done.code == 2, done.out
        assert done.out == ""
        check_one_message(done.err, *says)
    assert not (project / "runs").exists()


def test_too_few_nodes_are_left(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of two nodes cannot avoid one of two."""

    project = make_project(tmp_path)
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    command = ("sbatch", "--parsable", "--hold", "--nodes=2", "--wrap=true", "--output=/dev/null")
    job = slurm.run(*command, cwd=project).strip()
    run_dir = tmp_path / "runs" / "tiny"
    monkeypatch.setenv("SLURM_JOB_ID", job)
    assert requeue(run_dir, job, "exclude") == NO_BAD_NODES  # it has named none
    record_bad_nodes(run_dir, f"drawbar-{job}", {"n2": "node n2 did not answer within 60 s"})
    assert requeue(run_dir, job, "only-if-lost") == GAVE_UP  # n2 is not lost
    assert capsys.readouterr().out == ""
    assert requeue(run_dir, job, "exclude") == GAVE_UP
    assert re.search(r"without n2 there are 1 nodes, too few for job \d+; it ends here", capsys.readouterr().err)
    assert slurm.facts(job)["ExcNodeList"] == "(null)"
    slurm.run("scancel", job)
