"""Naive twins of the mechanisms: slow functions that compute each plan directly from its formula.

One sentence, one head, float64, plain loops, no masks. Each function returns a transport plan of total mass 1 as an
``(n, m)`` tensor; attention is n times the plan. It is differentiable, and huge scores do not overflow. The tests
compare every mechanism with its twin, forward and all gradients.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def matrix(rows: Iterable[Iterable[Any]]) -> Tensor:
    """A tensor from a list of lists of scalars."""
    return torch.stack([torch.stack(list(row)) for row in rows])


def scores(q: Tensor, k: Tensor) -> Tensor:
    """``s·q_i·k_j`` with ``s = d^-1/2``."""
    s = 1 / math.sqrt(q.size(-1))
    return matrix([s * (q_i * k_j).sum() for k_j in k] for q_i in q)


def uniform(n: int) -> Tensor:
    return torch.full((n,), 1.0 / n, dtype=torch.float64)


def entropic_plan(similarity: Tensor, a: Tensor, b: Tensor, num_updates: int) -> Tensor:
    """``exp(f_i + similarity_ij + g_j)`` after updates that alternate between g and f; the last one is of f."""
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for left in range(num_updates, 0, -1):
        if left % 2 == 1:
            f = torch.log(a) - torch.logsumexp(similarity + g[None, :], 1)
        else:
            g = torch.log(b) - torch.logsumexp(similarity + f[:, None], 0)
    return torch.exp(f[:, None] + similarity + g[None, :])


def alibi_slopes(num_heads: int) -> list[float]:
    """The slopes of [ALiBi]: a geometric sequence; two interleaved ones if ``num_heads`` is not a power of two."""
    exponent = math.log2(num_heads)
    if exponent.is_integer():
        ratio = 2 ** (-8 / num_heads)
        return [ratio ** (head + 1) for head in range(num_heads)]
    below = 2 ** math.floor(exponent)
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: num_heads - below]


def with_prior(similarity: Tensor, slope: float, first: int = 0) -> Tensor:
    """Subtract ``slope`` times the distance of query and key, which favours near keys; query 0 stands at ``first``."""
    rows = enumerate(similarity, start=first)
    return matrix([entry - slope * abs(i - j) for j, entry in enumerate(row)] for i, row in rows)


def softmax_plan(q: Tensor, k: Tensor, *, slope: float = 0.0) -> Tensor:
    """Softmax over the keys, divided by n: each query has mass 1/n, and the masses of the keys are free."""
    return torch.softmax(with_prior(scores(q, k), slope), 1) / len(q)


def sinkhorn_plan(q: Tensor, k: Tensor, *, epsilon: float | Tensor, num_updates: int, slope: float = 0.0) -> Tensor:
    """The plan with uniform marginals that maximises ``⟨P, scores⟩ - epsilon KL(P‖prior)``, after ``num_updates``."""
    similarity = with_prior(scores(q, k) / epsilon, slope)
    return entropic_plan(similarity, uniform(len(q)), uniform(len(k)), num_updates)


def lot_plan(
    q: Tensor,
    k: Tensor,
    pivots: Tensor,
    mass_logits: Tensor,
    *,
    epsilon: float,
    num_updates: int,
    query_updates: int | None = None,
) -> Tensor:
    """``Γ1 diag(1/σ) Γ2ᵀ`` with pivot masses σ; the marginals are exact for the queries in Γ1, for the pivots in Γ2."""
    query_updates = num_updates if query_updates is None else query_updates
    masses = torch.softmax(mass_logits, 0)
    gamma_1 = entropic_plan(scores(q, pivots) / epsilon, uniform(len(q)), masses, query_updates)
    gamma_2 = entropic_plan(scores(pivots, k) / epsilon, masses, uniform(len(k)), num_updates).T
    pivot = range(len(pivots))
    return matrix(
        [sum(gamma_1[i, p] / masses[p] * gamma_2[j, p] for p in pivot) for j in range(len(k))] for i in range(len(q))
    )


def near_far_plan(
    q: Tensor,
    k: Tensor,
    features: Tensor,
    bias: Tensor,
    *,
    window: int,
    num_updates: int = 1,
    band: str = "diagonal",
    causal: bool = False,
    slope: float = 0.0,
    exact_up_to: int = 0,
    tangents: bool = False,
) -> Tensor:
    """The entropic plan of a kernel that is ``exp(score)`` within the window and ``Σ_t φ_t(q) ψ_t(k)`` elsewhere.

    With ``tangents`` the features of the queries depend on all keys; the causal form ignores this option. With at most
    ``exact_up_to`` keys all scores are exact. The causal form has exact scores in the rows of the first
    ``exact_up_to`` tokens.
    """
    n, m, s = len(q), len(k), 1 / math.sqrt(q.size(-1))
    first = m - n if causal else 0
    exact, far = scores(q, k), torch.full((n, m), -math.inf, dtype=torch.float64)
    if len(features):
        phi = scores(q, features) - s * (q**2).sum(1, keepdim=True) / 2 + bias - math.log(len(features))
        psi = scores(k, features) - s * (k**2).sum(1, keepdim=True) / 2
        if tangents and not causal:
            psi = scores(k, features)
            means = torch.softmax(psi, 0).T @ k
            phi = matrix([s * ((q_i - z) @ mean) for z, mean in zip(features, means, strict=True)] for q_i in q)
            phi = phi + bias - math.log(len(features))
        far = matrix([torch.logsumexp(phi_i + psi_j, 0) for psi_j in psi] for phi_i in phi)
    centres = [first + i for i in range(n)]
    if band == "expected":
        means = [sum(j * share.item() for j, share in enumerate(torch.softmax(row, 0))) for row in far]
        centres = [math.floor(mean + 0.501) for mean in means]
    whole = [(first + i + 1 if causal else m) <= exact_up_to for i in range(n)]
    similarity = matrix(
        [exact[i, j] if whole[i] or abs(centres[i] - j) <= window else far[i, j] for j in range(m)] for i in range(n)
    )
    similarity = with_prior(similarity, slope, first)
    if causal:
        similarity = similarity + torch.full((n, m), -math.inf, dtype=torch.float64).triu(1 + m - n)
    return entropic_plan(similarity, uniform(n), uniform(m), num_updates)


def set_plan(
    x: Tensor, pivots: Tensor, *, epsilon: float, num_updates: int, positional_temperature: float | None = None
) -> Tensor:
    """Tokens x to tokens through pivots of equal mass, by a Gaussian kernel.

    With a ``positional_temperature`` τ both plans are multiplied by ``exp(-(i/n - t/r)²/τ²)`` and their rows rescaled.
    """
    n, r = len(x), len(pivots)
    s = 1 / math.sqrt(x.size(-1))
    similarity = matrix([-s * ((x_i - z_t) ** 2).sum() / 2 / epsilon for z_t in pivots] for x_i in x)
    there = entropic_plan(similarity, uniform(n), uniform(r), num_updates)
    back = entropic_plan(similarity.T, uniform(r), uniform(n), num_updates)
    if positional_temperature is not None:
        factor = torch.zeros(n, r, dtype=torch.float64)
        for i in range(n):
            for t in range(r):
                factor[i, t] = math.exp(-((((i + 1) / n - (t + 1) / r) / positional_temperature) ** 2))
        there, back = there * factor, back * factor.T
        there = matrix(row / row.sum() / n for row in there)
        back = matrix(row / row.sum() / r for row in back)
    return there @ back * r


def convolution(v: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution of v over the tokens, with zeros beyond both ends."""
    kernel = weight.size(-1)
    rows: list[Any] = []
    for i in range(len(v)):
        neighbours = [(o, i + o - kernel // 2) for o in range(kernel)]
        rows.append(sum(weight[:, o] * v[j] for o, j in neighbours if 0 <= j < len(v)))
    return torch.stack(rows)


def overlap_plan(n: int, m: int) -> Tensor:
    """``I_ij = |[i/n, (i+1)/n] ∩ [j/m, (j+1)/m]|``, the plan between two sorted uniform measures."""
    plan = torch.zeros(n, m, dtype=torch.float64)
    for i in range(n):
        for j in range(m):
            plan[i, j] = max(0.0, min((i + 1) / n, (j + 1) / m) - max(i / n, j / m))
    return plan


def order(line: Tensor) -> list[int]:
    """Indices that sort the values, ascending."""
    numbers = line.tolist()
    return sorted(range(len(numbers)), key=lambda i: numbers[i])


def soft_sort(line: Tensor, temperature: float) -> Tensor:
    """SoftSort: row i is a softmax over the values that peaks at the i-th smallest."""
    ordered = [line[i] for i in order(line)]
    rows = []
    for value in ordered:
        kernel = [torch.exp(-((value - x) ** 2) / temperature) for x in line]
        rows.append([x / sum(kernel) for x in kernel])
    return matrix(rows)


def hard_sort(line: Tensor) -> Tensor:
    """The permutation matrix that sorts the values."""
    permutation = torch.zeros(len(line), len(line), dtype=torch.float64)
    for rank, i in enumerate(order(line)):
        permutation[rank, i] = 1.0
    return permutation


def sliced_plans(
    q: Tensor, k: Tensor, slices: Tensor, *, sort_temperature: float, hard: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """``U_l = A_lᵀ I B_l`` and ``D_l = Σ_ij ‖q_i - k_j‖² U_l,ij`` for every slice; q and k are not scaled."""
    plans: list[Tensor] = []
    costs: list[Any] = []
    for slice_ in slices:
        direction = slice_ / torch.sqrt((slice_**2).sum())
        q_line, k_line = q @ direction, k @ direction
        if hard:
            sort_q, sort_k = hard_sort(q_line), hard_sort(k_line)
        else:
            sort_q, sort_k = soft_sort(q_line, sort_temperature), soft_sort(k_line, sort_temperature)
        plan = sort_q.T @ overlap_plan(len(q), len(k)) @ sort_k
        cost = sum(((q[i] - k[j]) ** 2).sum() * plan[i, j] for i in range(len(q)) for j in range(len(k)))
        plans.append(plan)
        costs.append(cost)
    return plans, costs


def esp_plan(
    q: Tensor,
    k: Tensor,
    slices: Tensor,
    *,
    sort_temperature: float,
    slice_inverse_temperature: float,
    hard: bool = False,
) -> Tensor:
    """``Σ_l σ_l U_l`` with ``σ_l ∝ exp(-τ D_l)``; q and k are scaled by d^-1/2."""
    s = 1 / math.sqrt(q.size(-1))
    plans, costs = sliced_plans(s * q, s * k, slices, sort_temperature=sort_temperature, hard=hard)
    weights = torch.softmax(-slice_inverse_temperature * torch.stack(costs), 0)
    return sum(weight * plan for weight, plan in zip(weights, plans, strict=True))


def differential_values(
    first: Tensor,
    second: Tensor,
    v_first: Tensor,
    v_second: Tensor,
    weight: Tensor,
    lambdas: Sequence[Tensor],
    *,
    lambda_init: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``A1 - λ A2`` of a pair of heads, and ``RMSNorm((A1 - λ A2) [V1, V2])·(1 - λ_init)`` in one half per head."""
    q1, k1, q2, k2 = lambdas
    difference_weight = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + lambda_init
    attention = len(first) * (first - difference_weight * second)
    rows = []
    for row in attention:
        value = sum(row[j] * torch.cat([v_first[j], v_second[j]]) for j in range(len(v_first)))
        root = torch.sqrt((value**2).mean() + 1e-5)
        rows.append(value / root * weight * (1 - lambda_init))
    values = torch.stack(rows)
    half = v_first.size(-1)
    return attention, values[:, :half], values[:, half:]
