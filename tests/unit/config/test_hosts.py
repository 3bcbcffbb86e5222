"""Hosts: hostfiles as MPI and DeepSpeed know them, ``--hosts``, and names that could be taken for something else."""

from pathlib import Path

import pytest

from drawbar.config.io.load_config import load_config
from drawbar.errors import UserError
from drawbar.jobs.commands.submit import host_settings
from drawbar.jobs.hosts_file import Host, parse_hosts, read_hostfile
from drawbar.jobs.ssh.ssh_launcher import SshLauncher, count_processes

BAD_NAMES = [
    "-oProxyCommand=touch", "a b", "'a'", '"a"', "$(a)", "`a`", "a;b", "a|b", "a&b", "a>b", "a/b", "a\\b", "*", "~",
    "é", "a@b@c", "@a", "-l@a", ".", "a%b", "a[1-2]", "{a,b}", "!a", "a" * 256, "a\x7f", "a\x00",
]  # fmt: skip


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_hostfile(tmp_path: Path) -> None:
    text = (
        "# two nodes\n\ngpu1 slots=8\n\tme@gpu2.example.org   slots=8  # the new one\n10.0.0.3\nlogin-alias_1 slots=1\n"
    )
    assert read_hostfile(write(tmp_path, text)) == [
        Host("gpu1", 8),
        Host("me@gpu2.example.org", 8),
        Host("10.0.0.3"),
        Host("login-alias_1", 1),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("gpu1 slots=4", "comes twice"),
        ("me@gpu1 slots=4", "comes twice"),
        ("gpu2 slots=0", "1 or more, got '0'"),
        ("gpu2 slots=-1", "1 or more, got '-1'"),
        ("gpu2 slots=two", "got 'two'"),
        ("gpu2 slots=", "got ''"),
        ("gpu2 slots = 4", "expected `gpu2 slots=N`"),
        ("gpu2 4", "expected `gpu2 slots=N`"),
        ("gpu2 slots=4 max_slots=8", "expected `gpu2 slots=N`"),
        ("gpu2:4", "is no name of a host"),
        ("slots=4", "is no name of a host"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path, f"# hosts\ngpu1 slots=4\n{line}\n")
    with pytest.raises(UserError, match=says) as caught:
        read_hostfile(path)
    assert caught.value.where == f"{path}:3"


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (write(tmp_path, "# nobody\n"), tmp_path / "missing", tmp_path):
        with pytest.raises(UserError):
            read_hostfile(path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        read_hostfile(tmp_path / "bytes")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_no_host_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError):
        parse_hosts(f"{name}:4")
    with pytest.raises(UserError):
        read_hostfile(write(tmp_path, f"{name} slots=4\n"))
    with pytest.raises(UserError, match=r"cluster\.hosts"):
        load_config(None, [f"cluster.hosts={[f'{name}:4']!r}"])


def test_hosts_of_a_command_line() -> None:
    assert parse_hosts("a:4, b:4,me@c") == [Host("a", 4), Host("b", 4), Host("me@c")]
    for text, says in {
        "": "no name",
        "a:4,": "no name",
        "a:0": "1 or more",
        "a:4,a:4": "twice",
        "a:4:4": "slots",
    }.items():
        with pytest.raises(UserError, match=says) as caught:
            parse_hosts(text)
        assert caught.value.where == f"--hosts {text}"


def test_where_hosts_come_from(tmp_path: Path) -> None:
    own = 'cluster.hosts=[a:4, "b:4"]'
    hostfile = str(write(tmp_path, "d slots=3"))
    for options, names in (
        ((None, None), '["a:4", "b:4"]'),
        (("c:2", None), '["c:2"]'),
        (("c,me@d", None), '["c:1", "me@d:1"]'),
        ((None, hostfile), '["d:3"]'),
    ):
        config = load_config(None, ["device=cpu", own, *host_settings(*options)]).config
        assert SshLauncher().settings(config, None)[0] == f"cluster.hosts={names}"
    with pytest.raises(UserError, match="no hosts to run on"):
        SshLauncher().settings(load_config(None, []).config, None)


@pytest.mark.parametrize(
    ("hosts", "settings", "count"),
    [
        ("a:4,b:4", [], 4),
        ("a,b", [], 1),
        ("a,b", ["cluster.gpus_per_node=8"], 8),
        ("a,b", ["launch.nproc=3"], 3),
        ("a:4,b:2", ["launch.nproc=2"], 2),
        ("a:4,b:2", [], "b has 2"),
        ("a:4,b", [], "b has 1"),
        ("a:4,b:2", ["launch.nproc=4"], "the host b has 2 slots"),
    ],
)
def test_processes_on_each_host(hosts: str, settings: list[str], count: int | str) -> None:
    config = load_config(None, settings).config
    if isinstance(count, int):
        assert count_processes(config, parse_hosts(hosts)) == count
        return
    with pytest.raises(UserError, match=count):
        count_processes(config, parse_hosts(hosts))


def test_a_tokenizer_is_no_secret() -> None:
    loaded = load_config(None, ["cluster.environment={TOKENIZERS_PARALLELISM: 'false'}"])
    assert loaded.config.cluster is not None


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("ssh_options={-oPort: 1}", "is no option of ssh"),
        ("ssh_options={RemoteCommand: touch x}", "the option RemoteCommand cannot be set for a launch over ssh"),
        ("ssh_options={BATCHMODE: no}", "the option BATCHMODE cannot be set for a launch over ssh"),
        ('ssh_options={User: "a\\nb"}', "expected a line of text"),
        ("ssh_options={User: ''}", "expected a line of text"),
        ("ssh_program=rsh", "cluster.ssh_program"),
        ("forward=['A B']", "cluster.forward"),
        ("forward=['*']", "cluster.forward"),
        ("environment={WANDB_API_KEY: x}", "looks like a secret"),
        ("environment={HF_TOKEN: x}", "looks like a secret"),
    ],
)
def test_settings_that_are_refused(setting: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_config(None, [f"cluster.{setting}"])
