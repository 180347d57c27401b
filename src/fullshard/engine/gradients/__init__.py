"""Gradients: from full ones that autograd leaves to sharded ones that an optimizer reads."""
