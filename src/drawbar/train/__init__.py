"""The loop, and everything that happens around it."""
