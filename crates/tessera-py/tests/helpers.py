"""Meshes, arrays and independent references that several tests use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tessera import dist

Array = NDArray[np.float32]

REPLICATED = dist.ReplicateSpec()


def make_mesh(**sizes: int) -> dist.Mesh:
    """Returns a mesh of these axes on CPUs."""
    return dist.Mesh(axes=list(sizes), shape=sizes)


def shard(**axis_of_dim: str) -> dist.ShardSpec:
    """Returns the spec that shards each named dim over an axis."""
    return dist.ShardSpec(partition=tuple(axis_of_dim), mesh_axes=tuple(axis_of_dim.values()))


def draw(rng: np.random.Generator, *shape: int) -> Array:
    """Draws an array of normal numbers."""
    return rng.standard_normal(shape, dtype=np.float32)


def draw_weight(rng: np.random.Generator, *shape: int) -> Array:
    """Draws a weight whose rows have a length of about 1, as in a trained network.

    Layers of longer rows amplify a rounding of f32: with scores of some hundreds, a softmax computed by numpy in f32 is wrong by
    1e-6, too.
    """
    return draw(rng, *shape) / np.float32(np.sqrt(shape[-1]))


def relative_error(found: Array, expected: NDArray[np.float64]) -> float:
    """Returns the largest difference, relative to the largest expected number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The softmax of the last dim."""
    exponents: NDArray[np.float64] = np.exp(x - x.max(axis=-1, keepdims=True))
    y: NDArray[np.float64] = exponents / exponents.sum(axis=-1, keepdims=True)
    return y


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """x times its sigmoid."""
    y: NDArray[np.float64] = x / (1 + np.exp(-x))
    return y


def attend(
    q: NDArray[np.floating], k: NDArray[np.floating], v: NDArray[np.floating], heads: int, causal: bool
) -> NDArray[np.float64]:
    """Attention of one sequence, in float64."""
    split = [x.astype(np.float64).reshape(len(x), heads, -1).transpose(1, 0, 2) for x in (q, k, v)]
    scores = split[0] @ split[1].transpose(0, 2, 1) / np.sqrt(split[0].shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[1:]) > 0, scores, -np.inf)
    return (softmax(scores) @ split[2]).transpose(1, 0, 2).reshape(len(q), -1)


def mix_experts(
    x: NDArray[np.floating], logits: NDArray[np.float64], banks: Sequence[NDArray[np.floating]], top_k: int
) -> NDArray[np.float64]:
    """A mixture of experts without a capacity, token by token, in float64."""
    gate, up, down = (bank.astype(np.float64) for bank in banks)
    scores = softmax(logits)
    mixed = np.zeros(x.shape)
    for token, row in enumerate(x.astype(np.float64)):
        chosen = np.argsort(-logits[token], kind="stable")[:top_k]
        weights = scores[token, chosen] / scores[token, chosen].sum()
        for weight, expert in zip(weights, chosen, strict=True):
            inner = silu(gate[expert] @ row) * (up[expert] @ row)
            mixed[token] += weight * (down[expert] @ inner)
    return mixed
