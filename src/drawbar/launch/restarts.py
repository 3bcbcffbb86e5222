"""The old name of :mod:`drawbar.launch.node.entry.restart`, for jobs that wait in a queue since an older version."""

import sys

from drawbar.launch.node.entry.restart import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
