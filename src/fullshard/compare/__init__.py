"""What a model computes, recorded and compared: `fullshard.debug`, `fullshard.replay`, and `fullshard verify`'s values."""
