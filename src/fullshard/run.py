"""``python -m fullshard.run script.py``: what `fullshard run` does, without the packages of `fullshard[train]`."""

from fullshard.tools.run_cli import main

if __name__ == "__main__":
    main()
