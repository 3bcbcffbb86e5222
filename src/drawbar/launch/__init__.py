"""Running a job elsewhere: what a job is, who can run it, what a node does before its ranks start, and what is known of
a job afterwards.

The modules that submit a job do not import torch. Those that run on the nodes may, such as ``node.agent``.
"""
