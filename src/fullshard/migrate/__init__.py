"""From `FullyShardedDataParallel` to `fully_shard`: the migration report, and moving state."""
