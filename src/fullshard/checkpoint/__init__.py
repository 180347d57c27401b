"""Checkpoint files: a directory of safetensors files and one manifest, which any job can load."""
