"""`python -m bench` is `python -m bench.run_all`."""

import sys

from .run_all import main

if __name__ == "__main__":
    sys.exit(main())
