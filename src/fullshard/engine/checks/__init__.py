"""What a program has to keep for a step to be right, and noticing when it does not."""
