"""vLLM's own ranks without a server, for all hosts but the first.

    python -m ultraep_serve.adapters.vllm.headless --model MODEL --headless [engine flags]

What ``vllm serve --headless`` does. That command starts only where a distribution is named vllm,
which CPU builds are not, and the module that starts servers has no headless mode. Verified with
0.32.
"""

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["main"]


def main() -> None:
    """Run the ranks of this host until they or the first host's end."""
    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(arguments)
    ServeSubcommand.cmd(arguments)


if __name__ == "__main__":
    main()
