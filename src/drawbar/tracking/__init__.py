"""Meters, metric files, trackers, and the console."""
