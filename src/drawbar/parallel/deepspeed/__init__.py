"""Everything that calls the DeepSpeed library."""
