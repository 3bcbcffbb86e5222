"""Scores over every sample exactly once, and text generation with a trained model."""
