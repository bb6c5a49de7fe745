"""What SGLang's modules need before they can be imported on CPU, where SGLang is installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("sglang") is not None:
    from ultraep_serve.adapters import sglang as adapter

    sys.path.append(str(Path(adapter.__file__).with_name("cpu_standins")))
