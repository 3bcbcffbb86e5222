"""Ways to train the same workload: each peer is a module with ``train(workload, settings, folder)``."""
