"""`ultraep-serve advise`: whether to balance, with how many slots, and why."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_serve.cli.arguments import DEFAULT, listed, read_costs, require_packages
from ultraep_serve.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ultraep_serve.offline.advice import Advice, Setting
    from ultraep_serve.offline.hardware import Estimate
    from ultraep_serve.offline.shapes import ModelShape

__all__ = ["add_parser", "run"]

MIB = 1 << 20


def add_parser(subparsers: Any) -> None:
    """Add `advise` to the main parser's ``subparsers``."""
    parser = subparsers.add_parser(
        "advise",
        help="predict what balancing would gain on your machine, before switching it on",
        description="Plan a recorded workload with each policy and predict prefill times on named "
        "hardware, or read a running server's imbalance. Says plainly when to leave it off.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help=".npz, or .parquet of loads")
    source.add_argument("--sidecar", metavar="URL", help="a running server's sidecar")
    parser.add_argument("--ep", type=int, help="ranks; with --sidecar what the server says")
    parser.add_argument(
        "--batch-tokens", type=int, help="tokens per batch over all ranks; not for traces of loads"
    )
    parser.add_argument("--slots", default="0,1,2,4", help=f"replica slots to compare ({DEFAULT})")
    parser.add_argument("--policies", default="quota,eplb", help=f"beside off ({DEFAULT})")
    parser.add_argument("--limit", type=int, default=16, help=f"batches at most ({DEFAULT})")
    _add_machine_arguments(parser)
    parser.add_argument("--json", type=Path, help="file to write the advice to")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="directory for three pictures")
    parser.set_defaults(run=run)


def _add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware", required=True, help="h100, h200, gb200, or custom with --costs"
    )
    parser.add_argument("--costs", type=Path, help="JSON of a cost model, for custom hardware")
    parser.add_argument(
        "--model-config", required=True, metavar="MODEL",
        help="a Hugging Face config.json or its directory, or a built-in: qwen3-235b-a22b, "
        "qwen3-30b-a3b, glm-4.7, deepseek-v3, deepseek-v2-lite",
    )  # fmt: skip
    parser.add_argument("--weights", default="bf16", help=f"bf16, fp8 or fp4 ({DEFAULT})")
    parser.add_argument(
        "--context", type=int, default=4096, help=f"tokens of a typical prompt ({DEFAULT})"
    )
    parser.add_argument(
        "--domain", type=int, help="ranks that reach each other's memory (default: the hardware's)"
    )
    parser.add_argument(
        "--efficiency", type=float, help="achieved share of the peak FLOPS (default: 0.5, assumed)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Find out, write the files, print. Raises UltraEPError with what to do."""
    require_packages("rich")
    from rich.console import Console

    from ultraep_serve.files import prepare_output

    _check(arguments)
    if arguments.json is not None:
        prepare_output(arguments.json)
    if arguments.sidecar is not None:
        document, pictures = _from_sidecar(arguments), dict[str, bytes]()
    else:
        document, pictures = _from_trace(arguments)
    _write(arguments, document, pictures)
    Console().print(_view(document))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for flag in ("ep", "batch_tokens", "limit", "context", "domain"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} = {value} must be 1 or more")
    if (arguments.hardware == "custom") != (arguments.costs is not None):
        raise ConfigError("--hardware custom and --costs FILE go together")
    if arguments.trace is not None and arguments.ep is None:
        raise ConfigError("--ep is missing: say over how many ranks experts are spread")
    if arguments.sidecar is not None and arguments.plots is not None:
        raise ConfigError("a live server has no expert loads to draw; use --plots with --trace")


def _from_trace(arguments: argparse.Namespace) -> "tuple[dict[str, Any], dict[str, bytes]]":
    from ultraep_serve.offline.advice import advise, prefill_batches
    from ultraep_serve.offline.comparators import policy_function
    from ultraep_serve.offline.plots import draw
    from ultraep_serve.offline.recommend import advice_document

    slots = _slots(arguments.slots)
    policies = listed(arguments.policies)
    for name in policies:
        policy_function(name)  # before the work, not after it
    setting = _setting(arguments, arguments.ep)
    cut = prefill_batches(arguments.trace, setting.shape, arguments.batch_tokens, arguments.ep)
    advice = advise(setting, cut, slots, policies, arguments.limit)
    pictures = dict(draw(advice, _pictured(advice, slots))) if arguments.plots else {}
    return advice_document(advice, arguments.trace.name, arguments.hardware), pictures


def _pictured(advice: "Advice", slots: list[int]) -> int:
    """The number of slots to show over time: the recommended one, or 2, or the most."""
    from ultraep_serve.offline.recommend import recommend

    chosen = recommend(advice).get("slots")
    return chosen if isinstance(chosen, int) else _usual(slots)


def _usual(slots: list[int]) -> int:
    return 2 if 2 in slots else max(slots)


def _from_sidecar(arguments: argparse.Namespace) -> dict[str, Any]:
    require_packages("httpx", "rich")
    from ultraep_serve.client.http import Endpoint, json_object
    from ultraep_serve.offline.recommend import (
        live_batch_tokens,
        live_document,
        live_figures,
        weighed,
    )

    with Endpoint("the sidecar", "--sidecar", arguments.sidecar, 30.0) as sidecar:

        def get(path: str) -> dict[str, Any]:
            response = sidecar.call("GET", path)
            if not response.is_success:
                raise sidecar.refused(response, "give the sidecar's address with --sidecar")
            return json_object(response)

        balance = get("/v1/balance")
        if not weighed(balance):  # under another policy no batch counts as quota's
            balance = get("/v1/balance?policy=off")
        ranks = live_figures(balance).num_ranks
        tokens = arguments.batch_tokens or live_batch_tokens(get("/v1/balance/batches?limit=200"))
    if arguments.ep not in (None, ranks):
        raise ConfigError(
            f"the server has {ranks} ranks; imbalance at --ep {arguments.ep} cannot be told from it"
        )
    slots = max(1, _usual(_slots(arguments.slots)))
    setting = _setting(arguments, ranks)
    return live_document(setting, balance, tokens, slots, sidecar.url, arguments.hardware)


def _setting(arguments: argparse.Namespace, num_ranks: int) -> "Setting":
    from ultraep_serve.offline.advice import Setting
    from ultraep_serve.offline.hardware import hardware
    from ultraep_serve.offline.shapes import model_shape

    shape = model_shape(arguments.model_config)
    domain = arguments.domain
    if domain is None and arguments.hardware != "custom":
        domain = hardware(arguments.hardware).domain_size
    estimate = _estimate(arguments, shape, num_ranks, domain)
    domain = None if domain is None or domain >= num_ranks else domain
    return Setting(shape, estimate, num_ranks, arguments.weights, domain)


def _estimate(
    arguments: argparse.Namespace, shape: "ModelShape", num_ranks: int, domain: int | None
) -> "Estimate":
    from ultraep_serve.offline.hardware import Efficiency, custom_estimate, estimate_costs, hardware

    if arguments.costs is not None:
        return custom_estimate(shape, read_costs(arguments.costs), arguments.costs.name)
    share = arguments.efficiency
    return estimate_costs(
        shape,
        hardware(arguments.hardware),
        num_ranks=num_ranks,
        weight_type=arguments.weights,
        context_tokens=arguments.context,
        domain_size=domain,
        efficiency=None if share is None else Efficiency(matrix=share, attention=share),
    )


def _slots(text: str) -> list[int]:
    try:
        slots = [int(number) for number in listed(text)]
    except ValueError:
        slots = []
    if not slots or not all(0 <= number <= 64 for number in slots):
        raise ConfigError(f"--slots = {text!r} must be numbers 0 to 64, as in 0,1,2,4")
    return list(dict.fromkeys(slots))


def _write(
    arguments: argparse.Namespace, document: dict[str, Any], pictures: dict[str, bytes]
) -> None:
    """Everything is complete by now; each file appears whole or not at all."""
    from ultraep_serve.files import whole_file, write_json

    if pictures:
        try:
            arguments.plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--plots {arguments.plots} cannot be made: {error}") from error
    for name, content in pictures.items():
        with whole_file(arguments.plots / name) as part:
            part.write_bytes(content)
    if arguments.json is not None:
        write_json(arguments.json, document)


def _view(document: dict[str, Any]) -> "RenderableType":
    """The advice for a terminal of 80 characters: verdict first."""
    from rich.console import Group
    from rich.text import Text

    now, verdict = document["imbalance_now"], document["recommendation"]
    head = Text(f"{document['model']} ({document['weights']}), EP{document['ep']} on ")
    head.append(f"{document['hardware']}, batches of {document['batch_tokens']:.0f} tokens\n")
    head.append(f"imbalance now: {now['mean']:.3f} (busiest rank over mean)")
    if now.get("floor", 1.0) > 1.001:
        head.append(f"; floor of the domains: {now['floor']:.3f}")
    head.append("\n\n")
    if verdict["balance"]:
        head.append(f"Turn it on: --policy quota --slots {verdict['slots']}", style="bold green")
        if verdict["min_batch_tokens"]:
            head.append(f" --min-batch-tokens {verdict['min_batch_tokens']}", style="bold green")
    elif verdict["balance"] is False:
        head.append("Leave it off.", style="bold yellow")
    for reason in verdict["reasons"]:
        head.append(f"\n- {reason}")
    notes = Text("Assumed:")
    for line in document["assumptions"]:
        notes.append(f"\n- {line}")
    table = [_table(document["outcomes"])] if document.get("outcomes") else [Text("")]
    return Group(head, *table, notes)


def _table(outcomes: list[dict[str, Any]]) -> "RenderableType":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy")
    for name in (
        "slots",
        "imbalance",
        "gain",
        "layers\nmoved",
        "MiB per\nrank",
        "break-even\ntokens",
    ):
        table.add_column(name, justify="right")
    for row in outcomes:
        slots = str(row["slots_needed"] if row["policy"] in ("llep", "exact") else row["slots"])
        table.add_row(
            row["policy"],
            slots,
            f"{row['imbalance']:.3f}",
            f"{row['predicted_gain']:.2f}x",
            f"{row['moved_share']:.0%}",
            f"{row['memory_bytes'] / MIB:.0f}",
            "-" if row["break_even_tokens"] is None else str(row["break_even_tokens"]),
        )
    return table
