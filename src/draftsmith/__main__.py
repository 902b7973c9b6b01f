"""`python -m draftsmith` is the same as `draftsmith`."""

import sys

from draftsmith.cli import main

if __name__ == "__main__":
    sys.exit(main())
