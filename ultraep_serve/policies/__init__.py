"""Policies: pure integer functions from loads to a plan, the same on every rank."""

from ultraep_serve.policies.quota import identity_plan, plan_quota, warm_up

__all__ = ["identity_plan", "plan_quota", "warm_up"]
