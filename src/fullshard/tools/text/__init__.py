"""Text to train on: where it is found, how it becomes tokens, and which of them a step is given."""
