"""What ``make_trace`` takes, and the flags of its command."""

from pydantic import Field, model_validator

from ultraep_lab.workloads import Kind, Workload
from ultraep_serve.system.settings import Settings


class WorkloadOptions(Settings):
    """A ``Workload``, checked."""

    kind: Kind = Field(default="zipf", description="kind of workload")
    num_experts: int = Field(
        default=128, validation_alias="experts", ge=1, le=1 << 15, description="experts per layer"
    )
    top_k: int = Field(default=8, ge=1, description="experts per token")
    num_layers: int = Field(default=8, validation_alias="layers", ge=1, description="MoE layers")
    num_tokens: int = Field(
        default=16384, validation_alias="tokens", ge=1, description="tokens in all"
    )
    num_ranks: int = Field(
        default=8, validation_alias="ep", ge=1, description="ranks that the imbalance is meant for"
    )
    period: int = Field(default=4096, ge=1, le=1 << 30, description="tokens between changes")
    seed: int = Field(default=0, ge=0, description="seed of the random draws")
    imbalance: float = Field(default=2.0, ge=1, description="expected max/mean over ranks")
    straggler: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="speed of the last rank, others have 1; replay plans for it",
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> "WorkloadOptions":
        if self.top_k > self.num_experts:
            raise ValueError(f"--top-k = {self.top_k} must be 1 to --experts")
        if self.num_experts % self.num_ranks:
            raise ValueError(f"--experts = {self.num_experts} must be a multiple of --ep")
        return self

    def workload(self) -> Workload:
        """The same for what draws it."""
        return Workload(**self.model_dump())
