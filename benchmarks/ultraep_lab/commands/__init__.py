"""The commands of the lab, one module each, which `ultraep-serve` finds by an entry point."""

COMMANDS = {  # name: module with add_arguments and run, help
    "bench": ("ultraep_lab.commands.bench", "measure a running server"),
    "demo": ("ultraep_lab.commands.demo", "show on a small model what balancing does"),
    "record": ("ultraep_lab.commands.record", "record a trace of a running server's routing"),
    "replay": ("ultraep_lab.commands.replay", "compare policies on a recorded trace"),
    "make-trace": ("ultraep_lab.commands.make_trace", "write a synthetic trace"),
}
