"""The configuration of a run: its schema, reading and merging, and which settings go together."""
