"""Weights of Hugging Face folders, in and out: safetensors files, each rank its own parts."""
