"""``drawbar submit``: what it takes from the configuration and from profiles, and what it refuses."""

import json
import os
import sys
from pathlib import Path

import pytest

from drawbar.config.io.load_config import load_config
from drawbar.config.rules.rule_table import check_rules
from drawbar.errors import UserError
from drawbar.jobs.preflight import SUBMIT_RULES
from drawbar.jobs.settings import ClusterSection
from harness import Finished, run_cli
from messages import check_one_message

BROKEN = {
    "GPUs for a run on the CPU": ["device=cpu", "cluster.gpus_per_node=1"],
    "processes and GPUs of a node": ["launch.nproc=4", "cluster.gpus_per_node=2"],
    "GPUs among the options": ["cluster.options={gpus-per-task: 4}"],
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
        ("options={output: x}", "drawbar writes the option output itself, or its jobs do not work with it"),
        ("options={gres: 'nvme:1,gpu:4'}", "GPUs are asked for by cluster.gpus_per_node"),
        ("gpus_per_node=a100", "or their type and number such as a100:4"),
        ("gpus_per_node=a100:0", "got 'a100:0'"),
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


PARTITIONS = """\
PartitionName=gpu Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP AllowAccounts=ALL MaxCPUsPerNode=96
PartitionName=old MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP AllowAccounts=ALL MaxCPUsPerNode=UNLIMITED
"""
NODES = {"gpu": "g1|128|gpu:a100:8|idle\ng2|64|gpu:a100:4|idle\n", "old": "o1|40|gpu:v100:4,gpu:k80:4|idle\n"}


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """An environment with programs that stand for Slurm's; nothing is ever submitted."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    nodes = "".join(f"*partition={name}*) printf '{text}';; " for name, text in NODES.items())
    for name, text in {"scontrol": f"echo '{PARTITIONS}'", "sinfo": f'case "$*" in {nodes} esac'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("settings", "cpus"),
    [
        (["gpus_per_node=8"], 96),  # all that the partition gives of the 128
        (["gpus_per_node=4"], 48),  # half a node, and not the 64 of another one
        (["gpus_per_node=v100:2", "partition=old"], 10),
        (["gpus_per_node=8", "cpus_per_task=16"], 16),
        (["gpus_per_node=8", "options={cpus-per-gpu: 6}"], None),
        ([], None),  # one CPU for one process is what Slurm gives
    ],
)
def test_a_job_gets_the_share_of_the_cpus(
    project: Path, site: dict[str, str], settings: list[str], cpus: int | None
) -> None:
    given = [f"cluster.{setting}" for setting in settings]
    command = ("submit", "config.yaml", "--to", "slurm", "device=auto", "train.micro_batch=1", *given, "--dry-run")
    done = run_cli(*command, cwd=project, env=site)
    assert done.code == 0, done.err
    assert "one for each process" not in done.err
    line = f"#SBATCH --cpus-per-task={cpus}\n"
    assert (line in done.out) if cpus else ("--cpus-per-task" not in done.out)
    assert done.out.count(f"--cpus-per-task={cpus} ") == (cpus is not None)  # srun does not take it over


def test_without_slurm_each_process_gets_a_cpu(project: Path) -> None:
    done = submit(project, "config.yaml", "launch.nproc=2", "train.micro_batch=1", "--dry-run")
    assert "#SBATCH --cpus-per-task=2\n" in done.out
    done = submit(project, "config.yaml", "device=auto", "train.micro_batch=1", "cluster.gpus_per_node=8", "--dry-run")
    assert "#SBATCH --cpus-per-task=8\n" in done.out
    assert "the job asks for 8 on each, one for each process; cluster.cpus_per_task asks for more" in done.err


def test_what_else_a_site_may_want_said(project: Path) -> None:
    options = {
        "gres": "nvme:1,shard:2",
        "dependency": "afterok:5:6?afterany:7",
        "reservation": "lab_monday",
        "constraint": "[rack1|rack2]&ib",
        "licenses": "matlab@server:1",
    }
    given = [f"cluster.options.{name}={json.dumps(value)}" for name, value in options.items()]
    given += ["device=auto", "train.micro_batch=1", "cluster.gpus_per_node=a100:4"]
    done = submit(project, "config.yaml", *given, "--dry-run")
    assert done.code == 0, done.err
    lines = {line.removeprefix("#SBATCH ").replace("'", "") for line in done.out.splitlines() if "#SBATCH" in line}
    options["gres"] = "gpu:a100:4,nvme:1,shard:2"
    assert {f"--{name}={value}" for name, value in options.items()} <= lines
    assert "launch.nproc=4 &" in done.out


def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(project: Path) -> None:
    done = submit(project, "config.yaml", "--nodes", "3")
    assert done.code == 2
    check_one_message(done.err, "train.global_batch=8 cannot be split evenly over 3 processes")
    done = submit(project, "config.yaml")
    assert done.code == 2
    check_one_message(done.err, "the command sbatch is not installed", "--dry-run")
    assert not (project / "runs").exists()


NO_CONFIGURATION = """\
#!/bin/sh
cat >&2 <<END
$(basename "$0"): error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
$(basename "$0"): error: fetch_config: DNS SRV lookup failed
$(basename "$0"): error: _establish_config_source: failed to fetch config
$(basename "$0"): fatal: Could not establish a configuration source
END
exit 1
"""
"""Any of Slurm's commands on a machine where they are installed, and no more."""


def test_commands_of_slurm_without_a_configuration(project: Path) -> None:
    tools = project / "bin"
    tools.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "sinfo"):
        (tools / name).write_text(NO_CONFIGURATION)
        (tools / name).chmod(0o755)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(project / "home")}
    done = run_cli("submit", "config.yaml", "--to", "slurm", cwd=project, env=environ)
    assert done.code == 2
    check_one_message(done.err, "Slurm is not configured on this machine", "slurm.conf", "a login node of the cluster")
    assert "resolve_ctls" not in done.err
    assert not (project / "runs").exists()


def test_training_here_does_not_read_the_section() -> None:
    check_rules(load_config(None, BROKEN["GPUs for a run on the CPU"]))
    assert ClusterSection().nodes == 1
