"""Optimizers that know about shards."""
