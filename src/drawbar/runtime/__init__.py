"""Logging, seeds, access to the Hugging Face Hub and pretrained files, and tensors read from safetensors files."""
