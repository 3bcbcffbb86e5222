"""The parts of the suite, W1 to W10: each module has ``measure(options) -> Report``."""
