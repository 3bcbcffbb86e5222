"""Starts and supervises the ranks of this machine. Where it is a node of several, their launchers check and watch one
another."""
