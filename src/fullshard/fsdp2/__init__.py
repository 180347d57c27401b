"""`fully_shard` and `replicate`: parameters sharded one by one, on the modules themselves."""
