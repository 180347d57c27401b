"""`FullyShardedDataParallel`: a wrapper whose parameters are sharded as one flat buffer."""
