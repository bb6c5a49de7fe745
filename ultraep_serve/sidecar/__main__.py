"""``python -m ultraep_serve.sidecar``: what the primary rank starts beside it."""

import argparse
import os
import sys

from ultraep_serve.errors import UltraEPError


def main() -> None:
    """Parse and serve; exits with 2 and a message when that cannot be.

    A sidecar with a parent leaves its process tree, which engines kill as a whole, and the files of
    the run would be left.
    """
    if "--parent" in sys.argv and os.fork():
        os._exit(0)
    from ultraep_serve.sidecar.serve import add_arguments, run  # here: forking has no threads yet

    parser = argparse.ArgumentParser(prog="ultraep-serve sidecar", description=__doc__)
    add_arguments(parser)
    try:
        run(parser.parse_args())
    except UltraEPError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
