"""Which samples a rank takes in a step, and ranks whose batches differ in how much they count or how many there are."""
