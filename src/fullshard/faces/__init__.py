"""What both faces build units with: coverage, meshes, and what libraries read of the result."""
