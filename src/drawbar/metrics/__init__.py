"""Scores of predictions by name: what ``task.metrics`` may say, and how each is computed."""
