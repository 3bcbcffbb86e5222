"""Logs, seeds, whether the Hub answers, and tensors read from safetensors files."""
