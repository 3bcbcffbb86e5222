"""Pipeline parallelism: stages, the steps of training, and forwards for evaluation and generation."""
