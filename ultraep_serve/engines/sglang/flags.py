"""SGLang's own reading of a command line, for a launcher that imports no engine.

    python -m ultraep_serve.engines.sglang.flags [engine flags]

prints what its parser makes of them, a file of flags included, as a line of JSON. What is resolved
is ``--dp-size N --enable-dp-attention``, which stands for ``--attn-dp-size N``, and nothing else:
that asks for a GPU and the model's files (``prepare_server_args``). Verified with 0.5.23.
"""

import argparse
import json
import sys

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger


def main() -> None:
    parser, flags = argparse.ArgumentParser(), sys.argv[1:]
    ServerArgs.add_cli_args(parser)
    if "--config" in flags:
        flags = ConfigArgumentMerger(parser).merge_config_with_args(flags)
    found = vars(parser.parse_args(flags))
    if found["enable_dp_attention"] and found["attn_dp_size"] == 1:
        found |= {"attn_dp_size": found["dp_size"], "dp_size": 1}
    sys.stdout.write(json.dumps({**found, "model": found["model_path"]}, default=repr))


if __name__ == "__main__":
    main()
