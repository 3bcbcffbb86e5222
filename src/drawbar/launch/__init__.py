"""Running a job elsewhere: what a job is, who can run it, what a node does before its ranks start, and what is known of
a job afterwards.

Nothing that submits imports torch. On the nodes, ``node.agent`` and the checks beside it do.
"""
