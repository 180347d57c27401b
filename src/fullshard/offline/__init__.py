"""Checkpoints without ranks or models: what is in them, whether it is whole, into other forms."""
