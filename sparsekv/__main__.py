"""`python -m sparsekv` is the command `sparsekv`."""

import sys

from sparsekv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
