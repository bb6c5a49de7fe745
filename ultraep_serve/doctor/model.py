"""What a model needs: experts that divide evenly, memory for weights, slots and KV cache."""

from pathlib import Path

from ultraep_serve.costs.shapes import ModelShape, model_shape, weight_bits
from ultraep_serve.doctor.finding import Finding, Subject, error, ok, size, warning
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.machine import available_memory
from ultraep_serve.telemetry.run_directory import is_running

__all__ = ["check_model"]

_TIGHT = 0.9  # of the memory; what is left is for activations and the rest of the machine


def check_model(
    subject: Subject, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> list[Finding]:
    """Experts and memory of the subject's model; nothing where no model is given."""
    if subject.model is None:
        return []
    try:
        shape = model_shape(subject.model)
        weight_bits(subject.weight_type)
    except ConfigError as reason:
        remedy = "name the directory of a Mixture-of-Experts model, or serve it with --policy off"
        return [error("model", str(reason), remedy)]
    findings = [_check_experts(shape, subject), _slots(shape, subject)]
    if subject.port is None or not is_running(subject.port):  # else it has its memory already
        findings.append(_check_memory(shape, subject, available_memory(meminfo, cgroup)))
    return findings


def _check_experts(shape: ModelShape, subject: Subject) -> Finding:
    ranks = subject.num_ranks
    seen = f"{shape.name}: {shape.num_experts} experts in each of {shape.num_moe_layers} MoE layers"
    if ranks < 2:
        return error("model", f"{seen}, one rank: nothing to balance", "use two ranks or more")
    if shape.num_experts % ranks:
        return error(
            "model",
            f"{seen}, which do not divide evenly over {ranks} ranks",
            f"choose a number of ranks that divides {shape.num_experts}",
        )
    return ok("model", f"{seen}, {shape.num_experts // ranks} on each of {ranks} ranks")


def _slots(shape: ModelShape, subject: Subject) -> Finding:
    expert = shape.expert_bytes(subject.weight_type)
    pool = subject.num_slots * expert
    tokens = pool // shape.kv_bytes_per_token
    return ok(
        "slots",
        f"{subject.num_slots} per rank, {size(expert)} each, shared by all layers: {size(pool)} "
        f"per rank, the KV cache of {tokens} tokens",
    )


def _check_memory(shape: ModelShape, subject: Subject, available: int | None) -> Finding:
    """A host holds its share of the weights; embeddings and activations come on top."""
    share = subject.all_ranks_here / (subject.num_ranks * subject.num_stages)
    weights = round(shape.weights * share * weight_bits(subject.weight_type) / 8)
    slots = subject.all_ranks_here * subject.num_slots * shape.expert_bytes(subject.weight_type)
    seen = f"weights {size(weights)} and slots {size(slots)} on this host"
    if available is None:
        remedy = "compare this with the machine's memory"
        return warning("memory", f"{seen}; available memory is not known", remedy)
    left = available - weights - slots
    seen += f", {size(available)} available"
    if left < 0:
        return error("memory", seen, "use a smaller model, fewer slots, or a larger machine")
    tokens = left // shape.kv_bytes_per_token
    seen += f"; the rest would hold the KV cache of {tokens} tokens"
    if weights + slots > _TIGHT * available:
        return warning("memory", seen, "little is left for the KV cache: use a larger machine")
    return ok("memory", seen)
