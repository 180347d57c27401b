"""Parameters of a unit: their two forms, the memory of both, and which one modules see."""
