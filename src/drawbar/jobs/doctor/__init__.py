"""What a machine is, what a run would use on it, and what is wrong with it.

Nothing here imports torch but ``probe``, which runs in its own process: a broken installation or a
driver that hangs is a finding.
"""
