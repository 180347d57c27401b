"""Access to whole parameters while a model is sharded and trains."""
