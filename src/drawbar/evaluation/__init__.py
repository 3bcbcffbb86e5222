"""Scores over every sample exactly once, and text from a trained model."""
