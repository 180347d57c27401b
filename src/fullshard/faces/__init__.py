"""Used by both APIs to build units: coverage, meshes, and private names that libraries read."""
