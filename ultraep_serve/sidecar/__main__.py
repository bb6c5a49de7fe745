"""``python -m ultraep_serve.sidecar``: what the launcher, or rank 0, starts beside the engine."""

import argparse

from ultraep_serve.errors import UltraEPError
from ultraep_serve.sidecar.serve import add_arguments, run


def main() -> None:
    """Parse and serve; exits with 2 and a message when that cannot be."""
    parser = argparse.ArgumentParser(prog="ultraep-serve sidecar", description=__doc__)
    add_arguments(parser)
    try:
        run(parser.parse_args())
    except UltraEPError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
