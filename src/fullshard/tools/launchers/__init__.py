"""Scripts and manifests that start a user's run where others do the starting: docs/launch.md."""
