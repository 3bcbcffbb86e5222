"""What a machine is, what a run would use on it, and what is wrong with it.

Nothing here imports torch but ``probe``, which runs in a process of its own: a broken installation or a
driver that hangs is a finding.
"""
