"""The configuration of a run: its schema, reading and merging, which settings go together, and DeepSpeed's JSON."""
