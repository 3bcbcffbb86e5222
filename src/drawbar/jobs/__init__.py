"""A guest: training on Slurm clusters and ssh hosts. What a job is, who can run it, what a node does before drawbar's
launcher starts there (``node``), what is known of jobs afterwards, and what is wrong with a machine (``doctor``).

What submits a job and asks for it does not import torch.
"""
