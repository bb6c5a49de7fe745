"""2,560 simulated ranks: `ultraep-serve simulate` in five settings, one JSON.

    python benchmarks/simulation.py --traces DIR --json benchmarks/results/simulation.json

DIR holds recorded routing, law.npz and intent.npz; without it the last setting is left out.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import harness

from ultraep_serve.cli import execute

# Imbalances that eight ranks can have with 256 experts, and with 576.
FEW_RANKS, MANY_EXPERTS = "1.3,1.6,2,2.5,3", "1.3,1.6,2,2.5"
SETTINGS = {
    "40 groups of 64": "--ep 64 --slots 2,1",
    "320 groups of 8": f"--ep 8 --slots 2,1 --imbalance {FEW_RANKS}",
    "domains and relays": (
        f"--ep 8,64,72 --domain-size 8,72 --relay auto,never --experts 576 "
        f"--imbalance {MANY_EXPERTS} --plans 30000"
    ),
    "slow ranks, slow and dead links": (
        "--ep 64 --slots 2,1 --slow-ranks 0.1 --slow-links 0.05 --dead-links 0.01 --plans 60000"
    ),
}
RECORDED = "--ep 8,32 --slots 2,1 --model-config deepseek-v2-lite --rank-tokens 1024 --plans 60000"


def main() -> None:
    """Run all settings; write them with the machine and the command to --json."""
    args = parse_arguments()
    settings = {name: words.split() for name, words in SETTINGS.items()}
    if args.traces:
        traces = [str(args.traces / name) for name in ("law.npz", "intent.npz")]
        settings["recorded routing"] = [*RECORDED.split(), "--trace", *traces]
    kept = {}
    if args.setting:
        settings = {name: settings[name] for name in args.setting}
        kept = json.loads(args.json.read_text())["settings"]
    limit = [] if args.plans is None else ["--plans", str(args.plans)]
    results = {name: simulated([*words, *limit]) for name, words in settings.items()}
    harness.write(args.json, {"settings": kept | results})


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--traces", type=Path, help="directory of the traces (default: none)")
    parser.add_argument("--setting", action="append", help="only these; the file keeps the rest")
    parser.add_argument("--plans", type=int, help="layers that each variant plans at most")
    return parser.parse_args()


def simulated(words: list[str]) -> dict[str, Any]:
    """What one command prints, and leaves as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        execute(["simulate", *words, "--json", str(path)])
        named = [Path(word).name if word.endswith(".npz") else word for word in words]
        command = " ".join(["ultraep-serve simulate", *named])
        return {"command": command, **json.loads(path.read_text())}


if __name__ == "__main__":
    main()
