"""Used by both APIs to build units: coverage, meshes, forms, and private names that libraries read."""
