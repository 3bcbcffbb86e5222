"""Tells ``drawbar submit`` over ssh how many GPUs torch sees on this machine.

    python -P -m drawbar.jobs.node.gpu_count

Reads a line of JSON from its standard input: the environment variables that a run would have, besides the host's own.
"""

import json
import os
import sys

import torch

from drawbar.jobs.ssh.protocol import submitter_message


def main() -> None:
    os.environ.update(json.loads(sys.stdin.readline()))  # before torch looks for GPUs
    sys.stdout.buffer.write(submitter_message(gpus=torch.cuda.device_count()))


if __name__ == "__main__":
    main()
