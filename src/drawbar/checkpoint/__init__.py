"""Checkpoints that are complete or absent, whatever happens to the process that writes them.

Independent of the strategy: one process writes a full ``Snapshot``, or each rank its own shards (a part). Every rank
reads what it needs.
"""
