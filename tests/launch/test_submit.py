"""``drawbar submit``: what it takes from the configuration and from profiles, and what it refuses."""

import sys
from pathlib import Path

import pytest

from drawbar.config.cluster import ClusterSection
from drawbar.config.cluster_rules import SUBMIT_RULES
from drawbar.config.load import load_config
from drawbar.config.rules import check_rules
from drawbar.errors import UserError
from harness import Finished, run_cli
from messages import check_one_message

BROKEN = {
    "GPUs for a run on the CPU": ["device=cpu", "cluster.gpus_per_node=1"],
    "processes and GPUs of a node": ["launch.nproc=4", "cluster.gpus_per_node=2"],
    "one process on several nodes": ["parallel.strategy=single", "cluster.nodes=2"],
    "a cluster of Macs": ["device=mps", "cluster.nodes=2"],
    "time limit": ["cluster.time=1", "cluster.signal_seconds=60"],
    "settings of a container": ["cluster.binds=[/data]"],
    "bad nodes and containers": ["cluster.image=x.sif", "cluster.exclude_bad_nodes=true"],
    "home with pyxis": ["cluster.image=x.sqsh", "cluster.home=/scratch/me"],
    "variables of a container's own": ["cluster.image=x.sif", "cluster.environment={PATH: /bin}"],
}


def submit(project: Path, *arguments: str, home: Path | None = None) -> Finished:
    environ = {"XDG_CONFIG_HOME": str(home or project / "home"), "PATH": "/nowhere"}
    return run_cli("submit", *arguments, "--to", "slurm", cwd=project, env=environ)


def test_every_rule_is_tried() -> None:
    assert [rule.name for rule in SUBMIT_RULES] == list(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_rule_refuses_and_explains(name: str) -> None:
    rule = next(rule for rule in SUBMIT_RULES if rule.name == name)
    with pytest.raises(UserError) as caught:
        check_rules(load_config(None, BROKEN[name]), SUBMIT_RULES)
    assert rule.reason in caught.value.what
    assert caught.value.remedy == rule.remedy
    for key in rule.keys:
        assert key in caught.value.what


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90", 5400), ("'90'", 5400), ("5:30", 330), ("90:00", 5400), ("12:00:00", 43200), ("100:00:00", 360000),
     ("2-00", 172800), ("1-02:30", 95400), ("1-02:30:15", 95415)],
)  # fmt: skip
def test_time_limits(written: str, seconds: int) -> None:
    section = load_config(None, [f"cluster.time={written}"]).config.cluster
    assert section is not None
    assert section.seconds == seconds


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("time=soon", "cluster.time"),
        ("time=1:2:3:4", "cluster.time"),
        ("time=99:99:99", "less than 60 minutes in an hour"),
        ("time=5:75", "got '5:75'"),
        ("time=1-24:00", "less than 24 hours in a day"),
        ("environment={HF_TOKEN: abc}", "HF_TOKEN looks like a secret"),
        ("environment={a-b: c}", "is no name of an environment variable"),
        ("options={--qos: high}", "without its dashes"),
        ("options={output: x}", "drawbar writes the option output itself"),
        ("options={qos: 'a b'}", "no option of sbatch needs"),
        ("setup=['#SBATCH --qos=high']", "one shell command a line"),
        ('setup=["a\\nb"]', "one shell command a line"),
        ("nodes=0", "cluster.nodes"),
        ("gpu_per_node=8", "did you mean cluster.gpus_per_node"),
    ],
)
def test_settings_that_are_refused(setting: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_config(None, [f"cluster.{setting}"])


def test_a_profile_fills_in_what_is_left_open(project: Path) -> None:
    profiles = project / "home" / "drawbar" / "clusters"
    profiles.mkdir(parents=True)
    (profiles / "site.yaml").write_text("partition: long\naccount: mine\nnodes: 4\nmodules: [a, b]\ntime: 1:00:00\n")
    (project / "cluster.yaml").write_text((project / "config.yaml").read_text() + "cluster: {time: '2:00:00'}\n")
    done = submit(project, "cluster.yaml", "cluster.modules=[c]", "--cluster", "site", "--nodes", "2", "--dry-run")
    assert done.code == 0, done.err
    options = {line.removeprefix("#SBATCH ") for line in done.out.splitlines() if line.startswith("#SBATCH")}
    assert {"--partition=long", "--account=mine", "--nodes=2", "--time=2:00:00"} <= options
    assert "module load c " in done.out
    assert "module load a" not in done.out
    assert f'{sys.executable} -m drawbar train "$drawbar_config" launch.nproc=1 &' in done.out

    (profiles / "broken.yaml").write_text("nodes: many\npartion: x\n")
    (profiles / "nested.yaml").write_text("cluster: {nodes: 2}\n")
    for name, says in {
        "broken": ["broken.yaml:1", "cluster.nodes", "broken.yaml:2", "did you mean cluster.partition"],
        "nested": ["nested.yaml", "without the word `cluster:`"],
        "sight": ["there is no cluster profile 'sight'", "did you mean site?"],
    }.items():
        done = submit(project, "config.yaml", "--cluster", name)
        assert done.code == 2
        check_one_message(done.err, *says)
    assert not (project / "runs").exists()


def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(project: Path) -> None:
    done = submit(project, "config.yaml", "--nodes", "3")
    assert done.code == 2
    check_one_message(done.err, "train.global_batch=8 cannot be split evenly over 3 processes")
    done = submit(project, "config.yaml")
    assert done.code == 2
    check_one_message(done.err, "the command sbatch is not installed", "--dry-run")
    assert not (project / "runs").exists()


def test_training_here_does_not_read_the_section() -> None:
    check_rules(load_config(None, BROKEN["GPUs for a run on the CPU"]))
    assert ClusterSection().nodes == 1
