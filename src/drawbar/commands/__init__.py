"""Implementations of the commands that use a run or its data: score, predict, generate, export, convert,
prepare, watch, and those on checkpoints.
"""
