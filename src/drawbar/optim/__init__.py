"""Optimizers, their parameter groups and learning-rate schedules, by the names that transformers users know."""
