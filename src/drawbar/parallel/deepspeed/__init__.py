"""The DeepSpeed library under drawbar: its import, its engine's state, its pipeline and tensor-parallel layers."""
