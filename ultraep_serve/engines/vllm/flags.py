"""vLLM's own reading of a command line, for a launcher that imports no engine.

    python -m ultraep_serve.engines.vllm.flags [engine flags]

prints what its parser makes of them, files of flags included, as a line of JSON. Verified with 0.32
and 0.33.
"""

import json
import sys

from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    parser.set_defaults(model=None, gpu_memory_utilization=None)  # whether the user chose is known
    parsed = parser.parse_args()
    if parsed.model_tag:  # which servers that are started as a module do not look at
        parser.error(f"{parsed.model_tag} follows flags; name the model first")
    sys.stdout.write(json.dumps(vars(parsed), default=repr))


if __name__ == "__main__":
    main()
