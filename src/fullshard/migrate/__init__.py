"""From `FullyShardedDataParallel` to `fully_shard`: what a wrapped model would be there."""
