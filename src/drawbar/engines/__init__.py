"""What runs a step under a strategy."""
