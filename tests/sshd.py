"""A real sshd on this machine, with two names for it: run from one folder, with keys and a port of its own.

Nothing of the user's own ssh is read or written: ``config`` says all that ssh needs.
"""

import os
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from harness import free_port, wait_until
from programs import search_path

ALIASES = ("gpu1", "gpu2")
_PRIVILEGE_SEPARATION = Path("/run/sshd")
"""Debian makes it when the machine's own sshd starts; sshd wants it where it runs as root."""

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile {folder}/pid
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
"""
CLIENT = """\
Host changed
  UserKnownHostsFile {folder}/changed_hosts
Host {names} stranger changed
  HostName 127.0.0.1
  Port {port}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
Host {names} changed
  IdentityFile {folder}/user_key
Host stranger
  IdentityFile {folder}/other_key
Host nobody
  HostName 127.0.0.1
  Port {unused}
"""
PROGRAMS = ("sshd", "ssh", "ssh-keygen")


@dataclass
class Sshd:
    """The hosts ``gpu1`` and ``gpu2``; ``stranger`` has a wrong key, ``nobody`` does not listen, and the key of
    ``changed`` is another than ssh knows."""

    folder: Path
    daemon: "subprocess.Popen[bytes]"

    @property
    def config(self) -> Path:
        return self.folder / "config"

    def sessions(self) -> list[int]:
        """The processes of sshd that hold connections."""
        return children(self.daemon.pid)


def start_sshd(folder: Path) -> Sshd:
    """Start it, and wait until it answers."""
    for name in ("host_key", "user_key", "other_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port, unused = free_port(), free_port()
    (folder / "sshd_config").write_text(SERVER.format(folder=folder, port=port))
    (folder / "config").write_text(CLIENT.format(folder=folder, port=port, unused=unused, names=" ".join(ALIASES)))
    for name, key in {"known_hosts": "host_key", "changed_hosts": "other_key"}.items():
        kind, text, *_ = (folder / f"{key}.pub").read_text().split()
        (folder / name).write_text(f"[127.0.0.1]:{port} {kind} {text}\n")
    if os.geteuid() == 0:
        _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    program = shutil.which("sshd", path=search_path())
    assert program is not None
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [program, "-D", "-e", "-f", folder / "sshd_config"], stderr=log, start_new_session=True
        )
    wait_until(lambda: _listens(port), lambda: (folder / "log").read_text())
    return Sshd(folder, daemon)


def stop_sshd(sshd: Sshd) -> None:
    for pid in sshd.sessions():
        os.kill(pid, signal.SIGKILL)
    sshd.daemon.terminate()
    sshd.daemon.wait(10)


def children(parent: int) -> list[int]:
    """The processes whose parent it is."""
    return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def processes(word: str) -> dict[int, str]:
    """The command lines of all processes with ``word`` in their environment or command line, without this one."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            texts = [(path / name).read_bytes() for name in ("cmdline", "environ")]
        except OSError:  # ended since, or another user's
            continue
        if any(word.encode() in text for text in texts) and int(path.name) != os.getpid():
            found[int(path.name)] = texts[0].replace(b"\0", b" ").decode(errors="replace")
    return found


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
