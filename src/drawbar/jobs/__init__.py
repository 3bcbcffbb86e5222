"""A guest: training on Slurm clusters and ssh hosts. What a job is, who can run it, what a node does before drawbar's
launcher starts there (``node``), what is known about jobs afterwards, and what is wrong with a machine (``doctor``).

The code that submits and queries jobs does not import torch.
"""
