"""What a machine is, what a run would use on it, and what is wrong with it.

What is checked is split into facts (collected by real calls) and functions from facts to findings. Nothing here imports
torch but ``probe``, which runs in processes of its own: a broken installation or a driver that hangs is a finding.
"""
