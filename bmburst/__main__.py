"""`python -m bmburst`: the command line from the source tree, without installing."""

import sys

from bmburst.cli import main

if __name__ == "__main__":
    sys.exit(main())
