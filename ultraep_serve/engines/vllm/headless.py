"""vLLM's own ranks without a server, for all hosts but the first.

    python -m ultraep_serve.engines.vllm.headless --model MODEL --headless [engine flags]

does what ``vllm serve --headless`` does. That command starts only where a distribution is named
vllm, which CPU builds are not, and the module that starts servers has no headless mode. Verified
with 0.32 and 0.33.
"""

from vllm.entrypoints.cli.serve import (  # defined elsewhere, in every version in another place
    ServeSubcommand,
    make_arg_parser,
    validate_parsed_serve_args,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ultraep_serve.system.environment import engine_variable, set_engine_variable

_STARTS_WORKERS = "VLLM_WORKER_MULTIPROC_METHOD"


def main() -> None:
    """Run the ranks of this host until they or the first host's end."""
    if engine_variable(_STARTS_WORKERS) is None:
        set_engine_variable(_STARTS_WORKERS, "spawn")  # as vLLM's own commands do
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(arguments)
    ServeSubcommand.cmd(arguments)


if __name__ == "__main__":
    main()
