"""Starts and supervises the ranks of this machine. If it is one of several nodes, their launchers check and watch one
another."""
