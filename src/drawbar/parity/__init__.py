"""``drawbar parity``: trains under a strategy and in one process, and compares what the two compute."""
