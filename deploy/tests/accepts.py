"""Run by an engine's interpreter: parse command lines from standard input as that engine does.

    python accepts.py vllm|vllm-engine|vllm-bench|sglang < lines.json

vllm-engine: the flags of the engine without those of a server, which programs that bring a server
of their own take. vllm-bench: those of `vllm bench serve`. Exits with the parser's own message at
the first line that it does not take.
"""

import argparse
import json
import sys


def vllm_parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def vllm_engine_parser() -> argparse.ArgumentParser:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def vllm_bench_parser() -> argparse.ArgumentParser:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser


def sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def check_connectors(settings: argparse.Namespace) -> None:
    """Fail on a way of moving the KV cache that this vLLM does not know."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )

    if settings.kv_transfer_config is not None:
        assert settings.kv_transfer_config.kv_connector in KVConnectorFactory._registry


PARSERS = {
    "vllm": vllm_parser,
    "vllm-engine": vllm_engine_parser,
    "vllm-bench": vllm_bench_parser,
    "sglang": sglang_parser,
}
parser = PARSERS[sys.argv[1]]()
for line in json.load(sys.stdin):
    parsed = parser.parse_args(line)
    if sys.argv[1] == "vllm":
        check_connectors(parsed)
