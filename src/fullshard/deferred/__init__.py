"""Models that are built without memory, and get the values of an ordinary construction later."""
