"""Jobs of a Slurm cluster: the batch script, what Slurm could run, what it says of its queue, and allocations."""
