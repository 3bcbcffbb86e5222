"""Runs on the first node of a Slurm job, before the others: prints the endpoint of the rendezvous, ``address:port``.

    python -m drawbar.jobs.node.first_node NAME JOB [INTERFACE]

NAME is how the scheduler reaches the node. The address is that of INTERFACE, or of an InfiniBand interface, or NAME's.
"""

import sys

from drawbar.jobs.node.network import choose_address, choose_port


def main(arguments: list[str]) -> int:
    name, job, *interface = arguments
    try:
        endpoint = f"{choose_address(name, interface[0] if interface else None)}:{choose_port(job)}"
    except OSError as error:
        print(f"error: the first node, {name}, has no address for the rendezvous: {error}", file=sys.stderr)
        print("  fix:   set cluster.interface to one that the nodes share (`ip address` lists them)", file=sys.stderr)
        return 1
    print(endpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
