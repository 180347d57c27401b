"""The order of streams, proven without a GPU: see `lab`."""
