"""`python -m fullshard`, the same as the `fullshard` console script."""

from fullshard.tools.cli import main

if __name__ == "__main__":
    main()
