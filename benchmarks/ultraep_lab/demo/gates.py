"""Gate weights that draw chosen shares of a layer's tokens to chosen experts, per domain.

Inputs: what the gate sees on calibration text, h (T, H), and each token's domain. Output (E, H):

    gate = noise + bias @ detectors

``noise`` has no component along any domain's mean of h, so it only spreads tokens over experts.
``detectors`` (D, H) recognise a token's domain: detector d gives about 1 on domain d and 0 on the
others. ``bias`` (E, D) is tuned until the measured shares of tokens meet the profile.

Shape letters: T tokens, H hidden size, E experts, R ranks, K experts per token, D domains.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ultraep_lab.demo.spec import MAX_EXPERT_SHARE, ModelSpec
from ultraep_lab.demo.text import DOMAINS

ITERATIONS = 100
NUM_HOT = 2  # experts of the hot rank that take most of its load: what two replica slots can move
RIDGE = 3e-2  # relative to the mean variance of h; keeps detectors small, so they can be rounded
PASSAGE = 64  # tokens
PASSAGE_WEIGHT = 300.0  # of passage means in the covariance that rows are made with; 64 is neutral
PAIR_NOISE = 0.05  # relative difference between the rows of a balanced model's i-th experts
SPREAD = 2.0  # of router logits


@dataclass(frozen=True)
class _Problem:
    """One layer's calibration set, with what does not depend on the bias worked out."""

    noise_logits: Tensor  # (T, E)
    detected: Tensor  # (T, D)
    token_domain: Tensor  # (T,)
    target: Tensor  # (D, E): share of the domain's tokens that choose the expert; rows sum to K


def calibrate_gate(
    hidden: Tensor,
    token_domain: Tensor,
    layer: int,
    spec: ModelSpec,
    generator: torch.Generator,
) -> Tensor:
    """Gate rows (E, H) for a layer from its gate's inputs ``hidden`` (T, H) on calibration text.

    ``token_domain`` (T,) indexes ``DOMAINS``.
    """
    means = domain_means(hidden, token_domain)
    covariance = _penalised_covariance(hidden - means[token_domain])
    detectors = _detectors(covariance, means)
    noise = _noise_rows(covariance, means, spec, generator)
    noise *= SPREAD / (hidden @ noise.T).std(0).unsqueeze(1)
    target = torch.stack([target_shares(spec, layer, d) for d in range(len(DOMAINS))])
    problem = _Problem(hidden @ noise.T, hidden @ detectors.T, token_domain, target)
    with one_thread():
        bias = _tune(problem, spec)
    return noise + bias @ detectors


def domain_means(hidden: Tensor, token_domain: Tensor) -> Tensor:
    """Mean (D, H) of ``hidden`` (T, H) over the tokens of each domain."""
    return torch.stack([hidden[token_domain == d].mean(0) for d in range(len(DOMAINS))])


def target_shares(spec: ModelSpec, layer: int, domain: int) -> Tensor:
    """Share of the domain's tokens that each expert should attract (E,); sums to K.

    The hot rank gets K * imbalance / R, most of it on ``NUM_HOT`` experts; the others share the
    rest evenly, each with a gentle slope over its experts.
    """
    ranks, experts = spec.num_ranks, spec.experts_per_rank
    if spec.imbalance == 1.0 or ranks == 1:
        return torch.full((spec.num_experts,), spec.experts_per_token / spec.num_experts)
    hot_total = spec.experts_per_token * spec.imbalance / ranks
    cold_total = (spec.experts_per_token - hot_total) / (ranks - 1)
    tail = 0.5 / torch.arange(1, experts).sqrt()
    hot = torch.cat([torch.tensor([1.0, 0.95]), tail])[:experts]
    shares = _scaled(1.0 / (torch.arange(experts) + 3.0), cold_total).repeat(ranks, 1)
    shares[hot_rank(spec, layer, domain)] = _scaled(hot, hot_total)
    # Each domain starts at another place of one order per layer, so hot experts differ by domain.
    order = torch.from_numpy(np.random.default_rng((spec.seed, layer)).permutation(experts))
    placed = torch.empty_like(shares)
    placed[:, order.roll(-NUM_HOT * (domain // ranks))] = shares
    return placed.flatten()


def hot_rank(spec: ModelSpec, layer: int, domain: int) -> int:
    """The rank that gets the most: another one for each layer and domain, in turn."""
    return (layer + domain) % spec.num_ranks


def _penalised_covariance(within: Tensor) -> Tensor:
    """Covariance (H, H) of ``within`` (T, H), counting heavily what whole passages have in common.

    Attention gives neighbouring tokens common parts that differ from text to text; a gate that
    depended on them would skew each batch in another way.
    """
    passages = within.view(-1, PASSAGE, within.shape[1]).mean(1)
    covariance = within.T @ within / len(within)
    covariance += PASSAGE_WEIGHT * (passages.T @ passages) / len(passages)
    covariance.diagonal().add_(RIDGE * float(covariance.diagonal().mean()))
    return covariance


def _detectors(covariance: Tensor, means: Tensor) -> Tensor:
    """Linear discriminants (D, H): smallest penalised variance, exactly 1 or 0 on the means."""
    whitened = torch.linalg.solve(covariance, means.T)  # (H, D)
    detectors: Tensor = torch.linalg.solve(means @ whitened, whitened.T)
    return detectors


def _noise_rows(
    covariance: Tensor, means: Tensor, spec: ModelSpec, generator: torch.Generator
) -> Tensor:
    """Random rows (E, H) orthogonal to every domain mean, of equal penalised variance each way.

    Balanced models give the i-th expert of every rank nearly the same row: a token then chooses
    them together, and even a small batch falls evenly on the ranks. Not where a token cannot take
    all of them (K no multiple of R): it would have to choose between near-equals.
    """
    rows = torch.randn(spec.num_experts, means.shape[1], generator=generator)
    if spec.imbalance == 1.0 and spec.experts_per_token % spec.num_ranks == 0:
        common = torch.randn(spec.experts_per_rank, means.shape[1], generator=generator)
        rows = common.repeat(spec.num_ranks, 1) + PAIR_NOISE * rows
    values, vectors = torch.linalg.eigh(covariance)
    rows = rows.matmul((vectors * values.rsqrt()) @ vectors.T)
    basis: Tensor = torch.linalg.qr(means.T).Q  # (H, D)
    rows -= (rows @ basis) @ basis.T
    return rows


def _tune(problem: _Problem, spec: ModelSpec) -> Tensor:
    """Bias (E, D) at which the measured shares meet the target; the best of a damped iteration."""
    domains, experts = problem.target.shape
    bias = torch.zeros(experts, domains)
    best, best_error = bias, math.inf
    for iteration in range(ITERATIONS):
        logits = problem.noise_logits + problem.detected @ bias.T
        shares = _measured_shares(logits.topk(spec.experts_per_token).indices, problem, spec)
        error = _rank_error(shares, problem.target, spec)
        if error < best_error and iteration >= ITERATIONS // 2:
            best, best_error = bias, error
        step = SPREAD * (0.6 if iteration < ITERATIONS // 3 else 0.25)
        update = _logit(problem.target) - _logit(shares)
        update += _rank_update(shares, problem.target, spec)
        bias = bias + step * update.clamp(-2, 2).T
        bias = bias - bias.mean(0)
    return best


def _measured_shares(chosen: Tensor, problem: _Problem, spec: ModelSpec) -> Tensor:
    """Share of each domain's tokens that chose each expert (D, E), from ``chosen`` (T, K)."""
    domains, experts = problem.target.shape
    flat = problem.token_domain.unsqueeze(1) * experts + chosen
    counts = flat.flatten().bincount(minlength=domains * experts).view(domains, experts)
    return counts * spec.experts_per_token / counts.sum(1, keepdim=True)


def _rank_error(shares: Tensor, target: Tensor, spec: ModelSpec) -> float:
    """Largest relative error of a rank's load in any domain, plus a little for single experts."""
    measured, wanted = _rank_sums(shares, spec), _rank_sums(target, spec)
    return float(
        ((measured - wanted).abs() / wanted.mean()).max() + 0.1 * (shares - target).abs().mean()
    )


def _rank_update(shares: Tensor, target: Tensor, spec: ModelSpec) -> Tensor:
    """Correction (D, E) for whole ranks: errors of single experts may remain, theirs must not."""
    push = (_rank_sums(target, spec) / _rank_sums(shares, spec).clamp_min(1e-3)).log()
    return push.repeat_interleave(spec.experts_per_rank, dim=1)


def _rank_sums(shares: Tensor, spec: ModelSpec) -> Tensor:
    return shares.view(len(shares), spec.num_ranks, -1).sum(-1)


def _scaled(weight: Tensor, total: float) -> Tensor:
    """``weight`` scaled to sum to ``total`` with no entry above ``MAX_EXPERT_SHARE``."""
    low, high = 0.0, total / float(weight.min())
    for _ in range(60):
        middle = (low + high) / 2
        enough = float((weight * middle).clamp_max(MAX_EXPERT_SHARE).sum()) >= total
        low, high = (low, middle) if enough else (middle, high)
    return (weight * high).clamp_max(MAX_EXPERT_SHARE)


def _logit(share: Tensor) -> Tensor:
    return torch.logit(share.clamp(1e-3, 1 - 1e-3))


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Run the body on one torch thread, if ``wanted``.

    Each parallel operation waits for all its threads; on a busy machine that wait is a time slice,
    so thousands of short operations take minutes on two threads and seconds on one.
    """
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
