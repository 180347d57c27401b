"""The language model that `fullshard train` trains."""
