"""``python -m ultraep_serve.cli``, the same as ``ultraep-serve``."""

import sys

from ultraep_serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
