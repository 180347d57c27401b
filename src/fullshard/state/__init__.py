"""State dicts of model and optimizer."""
