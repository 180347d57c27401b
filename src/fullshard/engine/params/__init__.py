"""Parameters of a unit: their two forms, the memory of both, and which form modules see."""
