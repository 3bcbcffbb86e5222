"""Optimizers, their parameter groups and learning rate schedules, under the names that transformers users know."""
