"""Experts: where tokens are sharded, how many slots an expert has, and how many experts a token has."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import REPLICATED, Array, draw, make_mesh, mix_experts, relative_error, shard, silu, softmax
from numpy.typing import NDArray
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt

TOKENS = ("token", "hidden")
TOKENS_BY_EP = shard(token="ep")


class Experts:
    """Arrays of a mixture of experts, and their plan on a mesh."""

    def __init__(self, rng: np.random.Generator, tokens: int, experts: int, width: int = 6) -> None:
        self.x, self.router = draw(rng, tokens, width), draw(rng, experts, width)
        self.banks = [draw(rng, experts, *shape) for shape in ((10, width), (10, width), (width, 10))]
        self.logits = self.x.astype(np.float64) @ self.router.T

    def plan(self, layer: op.Moe, mesh: dist.Mesh, spec: dist.ShardSpec | dist.ReplicateSpec) -> graph.Plan:
        """Plans the result, the choices of experts and the counts of tokens."""
        router = dist.distribute(self.router, mesh, REPLICATED)
        banks = [dist.distribute(bank, mesh, shard(experts="ep")) for bank in self.banks]

        def mixture(x: graph.Value) -> tuple[graph.Value, graph.Value, graph.Value]:
            return layer(x, router, *banks), layer.route(x, router), layer.count_tokens(x, router)

        return graph.trace(mixture, graph.ArraySpec(self.x.shape, mesh, spec, dims=TOKENS)).compile()

    def run(self, plan: graph.Plan) -> tuple[Array, Array, Array]:
        with rt.open_session(plan) as run:
            y, chosen, counts = run(self.x)
        return y.gather(), chosen.gather(), counts.gather()

    def mix_with_capacity(self, chosen: Array, capacity: int, groups: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The mixture when each group of consecutive tokens has slots of its own, and the counts, token by token."""
        gate, up, down = (bank.astype(np.float64) for bank in self.banks)
        scores, experts = softmax(self.logits), len(self.router)
        y, counts = np.zeros(self.x.shape), np.zeros((experts, 4))
        given = np.zeros((groups, experts), int)
        for token, row in enumerate(self.x.astype(np.float64)):
            picks = [int(expert) for expert in chosen[token] if expert >= 0]
            group = token * groups // len(self.x)
            for expert in picks:
                weight = scores[token, expert] / scores[token, picks].sum()
                has_slot = given[group, expert] < capacity
                counts[expert] += (1, has_slot, 0, not has_slot)
                if has_slot:
                    given[group, expert] += 1
                    y[token] += weight * (down[expert] @ (silu(gate[expert] @ row) * (up[expert] @ row)))
        return y, counts


def all_to_alls(plan: graph.Plan) -> list[str]:
    return [axis for name, axis, _ in plan.collectives() if name == "all_to_all"]


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"ep": 3}, {"tp": 2, "ep": 2}])
def test_sharded_tokens_reach_experts_by_all_to_all(rng: np.random.Generator, sizes: dict[str, int]) -> None:
    experts = Experts(rng, tokens=12, experts=6)
    layer = op.moe(num_experts=6, top_k=2, capacity_factor=6.0)
    mesh = make_mesh(**sizes)
    routed, gathered = (experts.plan(layer, mesh, spec) for spec in (TOKENS_BY_EP, REPLICATED))
    # The packed rows, their counts, and the results; among the ranks of ep alone.
    assert all_to_alls(routed) == ["ep"] * 3 and "group_size" not in routed.text()
    assert all_to_alls(gathered) == []
    assert not [name for name, _, _ in routed.collectives() if name == "all_gather"]
    # Ranks of one place on ep receive the same tokens: the rows are replicated over tp.
    received = [line for line in routed.text().splitlines() if "wait" in line and "f32[" in line]
    assert received and not [line for line in received if "tp: shard" in line]
    expected = mix_experts(experts.x, experts.logits, experts.banks, 2)
    for plan in (routed, gathered):
        y, chosen, counts = experts.run(plan)
        assert relative_error(y, expected) < 1e-6
        assert np.array_equal(chosen, np.argsort(-experts.logits, axis=1, kind="stable")[:, :2])
        assert counts[:, 3].sum() == 0 and counts[:, 1].sum() == 24


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_drops_the_tokens_that_find_no_slot(rng: np.random.Generator, ranks: int) -> None:
    experts = Experts(rng, tokens=40, experts=4)
    layer = op.moe(num_experts=4, top_k=2, capacity_factor=0.75)
    y, chosen, counts = experts.run(experts.plan(layer, make_mesh(ep=ranks), TOKENS_BY_EP))
    capacity = layer.capacity(tokens=40 // ranks)
    assert capacity == int(np.ceil(0.75 * (40 // ranks) * 2 / 4))
    expected, expected_counts = experts.mix_with_capacity(chosen, capacity, ranks)
    assert np.array_equal(counts, expected_counts) and counts[:, 3].sum() > 0
    assert relative_error(y, expected) < 1e-6


def test_tokens_in_unequal_shards_are_gathered(rng: np.random.Generator) -> None:
    experts = Experts(rng, tokens=13, experts=4)
    layer = op.moe(num_experts=4, top_k=2, capacity_factor=0.75)
    plan = experts.plan(layer, make_mesh(ep=2), TOKENS_BY_EP)
    assert all_to_alls(plan) == []
    y, chosen, counts = experts.run(plan)
    expected, expected_counts = experts.mix_with_capacity(chosen, layer.capacity(tokens=13), 1)
    assert np.array_equal(counts, expected_counts) and relative_error(y, expected) < 1e-6


def test_a_router_and_a_penalty_see_sharded_tokens_in_their_places(rng: np.random.Generator) -> None:
    experts = Experts(rng, tokens=8, experts=4)
    layer = op.moe(num_experts=4, top_k=1, capacity_factor=4.0, gate="topk_softmax_locality_penalized")
    results = [experts.run(experts.plan(layer, make_mesh(ep=2), spec)) for spec in (TOKENS_BY_EP, REPLICATED)]
    assert np.array_equal(results[0][1], results[1][1])
    assert relative_error(results[0][0], results[1][0].astype(np.float64)) < 1e-6


def test_a_fraction_of_tokens_has_an_expert_more(rng: np.random.Generator) -> None:
    experts = Experts(rng, tokens=2000, experts=4)
    layer = op.moe(num_experts=4, top_k=1.25, capacity_factor=4.0)
    assert repr(layer) == 'moe(num_experts=4, top_k=1.25, gate="topk_softmax")'
    assert layer.capacity(tokens=20) == 20 and op.moe(num_experts=4, top_k=1.5).capacity(tokens=16) == 8
    results = [
        experts.run(experts.plan(layer, make_mesh(**sizes), spec))
        for sizes, spec in (({"ep": 1}, REPLICATED), ({"ep": 2}, REPLICATED), ({"ep": 4}, TOKENS_BY_EP))
    ]
    chosen = results[0][1]
    ranking = np.argsort(-experts.logits, axis=1, kind="stable")[:, :2]
    assert np.array_equal(chosen[:, 0], ranking[:, 0])
    has_two = chosen[:, 1] >= 0
    assert np.array_equal(chosen[has_two, 1], ranking[has_two, 1]) and abs(has_two.mean() - 0.25) < 0.03
    expected, counts = experts.mix_with_capacity(chosen, 2000, 1)
    for found in results:
        assert np.array_equal(found[1], chosen) and np.array_equal(found[2], counts)
        assert relative_error(found[0], expected) < 1e-6
    other = op.moe(num_experts=4, top_k=1.25, seed=1)
    assert not np.array_equal(experts.run(experts.plan(other, make_mesh(ep=1), REPLICATED))[1], chosen)
    for wrong in (0.5, 4.5, float("nan")):
        with pytest.raises(TesseraError, match="of 4 experts"):
            op.moe(num_experts=4, top_k=wrong)
