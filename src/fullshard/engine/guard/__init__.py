"""Two mechanisms that notice what a program does to parameters: what changed, and who still refers to them."""
