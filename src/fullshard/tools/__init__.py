"""Command-line tools, built on fullshard's public names alone."""
