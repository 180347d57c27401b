"""Gradients: from the full ones that autograd leaves to the sharded ones that optimizers read."""
