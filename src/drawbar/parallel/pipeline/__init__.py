"""Pipeline parallelism: stages, training steps, and forwards for evaluation and generation."""
