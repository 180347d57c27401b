"""What a training run will need and take: memory, time, and which settings to choose."""
