"""What pdsh starts for each host, on the launcher's machine: ssh, with its streams led to the launcher.

    python -m drawbar.launch.relay SOCKET HOST COMMAND [ARGUMENT]...

pdsh gives the programs that it starts no standard input, and mixes up their exit codes.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from types import FrameType

from drawbar.launch.protocol import answer


def main(arguments: list[str]) -> int:
    path, host, *command = arguments
    with _connect(path, host, "output") as output, _connect(path, host, "errors") as errors:
        process = subprocess.Popen(command, stdin=output.fileno(), stdout=output.fileno(), stderr=errors.fileno())

        def kill(number: int, frame: FrameType | None) -> None:
            process.kill()

        signal.signal(signal.SIGTERM, kill)
        code = process.wait()
        with contextlib.suppress(OSError):  # the launcher may be gone
            output.sendall(answer(exit=code))
    return code


def _connect(path: str, host: str, stream: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    connection.sendall(json.dumps({"host": host, "stream": stream, "pid": os.getpid()}).encode() + b"\n")
    return connection


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
