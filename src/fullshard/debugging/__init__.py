"""`fullshard.debug` and `fullshard.replay`: checks that are switched on, and a step run again."""
