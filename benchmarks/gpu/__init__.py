"""What one hour on one GPU is for: ``python -m benchmarks gpu``."""
