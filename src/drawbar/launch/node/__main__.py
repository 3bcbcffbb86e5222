"""The old name of :mod:`drawbar.launch.node.entry.each_node`, for jobs that wait in a queue since an older version."""

import sys

from drawbar.launch.node.entry.each_node import main

if __name__ == "__main__":
    main(sys.argv[1:])
