"""Precision of programs: what becomes e4m3, and how stochastic rounding rounds, on every mesh alike."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import REPLICATED, Array, draw, make_mesh, mix_experts, relative_error, shard
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt

TOKENS = ("token", "hidden")
Spec = dist.ReplicateSpec | dist.ShardSpec


def project(mesh: dist.Mesh, x: Array, w: Array, policy: op.Numeric, x_spec: Spec = REPLICATED) -> graph.Plan:
    """Plans x · wᵀ, with the rows of w sharded over tp, under a policy."""
    linear = op.linear(policy=policy)
    captured = dist.distribute(w, mesh, shard(col="tp"))
    return graph.trace(lambda x: linear(x, captured), graph.ArraySpec(x.shape, mesh, x_spec, dims=TOKENS)).compile()


def run_once(plan: graph.Plan, x: Array, ranks: str = "threads") -> Array:
    with rt.open_session(plan, ranks=ranks, oversubscribe=True) as run:
        y: Array = run(x).gather()
    return y


def to_bf16(x: Array) -> Array:
    """Rounds to the nearest bf16, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def to_e4m3(x: Array) -> Array:
    """Rounds to the nearest e4m3, ties to even."""
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))), -6) - 3)
    y: Array = np.clip(np.round(x / step) * step, -448, 448).astype(np.float32)
    return y


def test_fp8_multiplies_e4m3_with_a_scale_per_row(rng: np.random.Generator) -> None:
    x, w = draw(rng, 6, 24), draw(rng, 10, 24)
    policy = op.numeric(dtype="fp8_e4m3", scale="per_channel")
    scaled = []
    for rows in (to_bf16(x), w):
        scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(448)
        scaled.append(to_e4m3(rows / scale).astype(np.float64) * scale)
    expected = scaled[0] @ scaled[1].T
    found = [
        run_once(project(make_mesh(tp=2), x, w, policy), x, "processes"),
        run_once(project(make_mesh(tp=1), x, w, policy), x),
        op.linear(policy=policy)(*(dist.distribute(a, make_mesh(tp=2), REPLICATED, dims=TOKENS) for a in (x, w))).gather(),
    ]
    assert np.array_equal(found[0], found[1])
    # The result is rounded to bf16. An operand that is no weight is rounded to bf16 before it is quantized.
    assert relative_error(found[0], expected) < 2**-8 and relative_error(found[2], expected) < 0.02
    assert "e4m3[" in project(make_mesh(tp=2), x, w, policy).text()


def test_row_parallel_fp8_moves_no_weight(rng: np.random.Generator) -> None:
    """Ranks quantize whole rows of the first operand, and add their terms before the bias."""
    x, w, bias = draw(rng, 6, 24), draw(rng, 10, 24), draw(rng, 10)
    policy = op.numeric(dtype="fp8_e4m3")
    results: list[Array] = []
    for tp in (1, 2):
        mesh = make_mesh(tp=tp)
        arrays = [dist.distribute(w, mesh, shard(row="tp")), dist.distribute(bias, mesh, REPLICATED)]

        def narrow(x: graph.Value, arrays: list[dist.DTensor] = arrays) -> graph.Value:
            return op.linear(policy=policy)(x, *arrays)

        plan = graph.trace(narrow, graph.ArraySpec(x.shape, mesh, shard(hidden="tp"), dims=TOKENS)).compile()
        moved = [(name, size) for name, _, size in plan.collectives()]
        # Whole rows of x in bf16 to be quantized, their columns back in e4m3 with the scales, and the sum.
        rows = [("all_to_all", 6 * 12 * 2), ("all_to_all", 3 * 24), ("all_gather", 3 * 4)]
        assert sorted(moved) == ([] if tp == 1 else sorted([*rows, ("reduce_scatter", 6 * 10 * 2)]))
        results.append(run_once(plan, x))
    assert relative_error(results[1], results[0].astype(np.float64)) < 2**-6


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_the_mean_of_a_million_roundings_is_the_number(dtype: str) -> None:
    """In units of the distance between the two neighbours of the number; the identity shows the rounded operand."""
    number, width = np.float32(0.3003), 17
    x = np.full((62_500, width), number, np.float32)
    # The largest number of a row gives it a scale that is a power of two.
    x[:, -1] = 1.75
    policy = op.numeric(dtype=dtype, stochastic_round=True)
    y = run_once(project(make_mesh(tp=1), x, np.eye(width, dtype=np.float32), policy), x)
    drawn = y[:, :-1].astype(np.float64)
    neighbours = np.unique(drawn)
    assert drawn.size == 1_000_000 and len(neighbours) == 2 and neighbours[0] < number < neighbours[1]
    assert abs(drawn.mean() - number) < 1e-3 * (neighbours[1] - neighbours[0])
    assert abs(drawn.mean() - number) < 1e-3
    assert np.array_equal(y[:, -1], x[:, -1])


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_roundings_are_those_of_every_run_and_mesh(rng: np.random.Generator, dtype: str) -> None:
    x, w = draw(rng, 8, 20), draw(rng, 12, 20)

    def rounded(tp: int, ranks: str = "threads", seed: int = 5, spec: Spec = REPLICATED) -> Array:
        policy = op.numeric(dtype=dtype, stochastic_round=True, seed=seed)
        return run_once(project(make_mesh(tp=tp), x, w, policy, spec), x, ranks)

    first = rounded(1)
    for tp in (1, 2, 4):
        assert np.array_equal(rounded(tp), first)
        for dim in ("token", "hidden"):
            assert np.array_equal(rounded(tp, spec=shard(**{dim: "tp"})), first)
    assert np.array_equal(rounded(2, "processes"), first)
    assert not np.array_equal(rounded(1, seed=6), first)
    nearest = run_once(project(make_mesh(tp=1), x, w, op.numeric(dtype=dtype)), x)
    assert not np.array_equal(nearest, first) and relative_error(first, nearest.astype(np.float64)) < 0.2


def test_weights_are_rounded_to_nearest(rng: np.random.Generator) -> None:
    w = draw(rng, 6, 6)
    policy = op.numeric(dtype="bf16", stochastic_round=True)
    plan = project(make_mesh(tp=2), w, w, policy)
    found = run_once(plan, np.eye(6, dtype=np.float32))
    assert np.array_equal(found, to_bf16(w).T)
    casts = [line for line in plan.text().splitlines() if "rounding" in line]
    assert len(casts) == 1 and 'rounding = "stochastic", seed = 0' in casts[0]


def test_a_router_stays_exact_whatever_changes_its_logits(rng: np.random.Generator) -> None:
    """Experts are chosen by logits in f32, so that a policy in low precision moves no token."""
    mesh = make_mesh(ep=2)
    x, router = draw(rng, 40, 16), draw(rng, 8, 16)
    layer = op.moe(num_experts=8, top_k=2, policy=op.numeric(dtype="fp8_e4m3"))
    op.set_router(layer, lambda logits, meta: logits - np.linspace(0, 0.1, 8, dtype=np.float32))
    chosen = layer.route(*(dist.distribute(a, mesh, REPLICATED) for a in (x, router))).gather()
    logits = x.astype(np.float64) @ router.T - np.linspace(0, 0.1, 8, dtype=np.float32)
    assert np.array_equal(chosen, np.argsort(-logits, axis=1, kind="stable")[:, :2])


def test_experts_in_low_precision_stay_near_the_exact_ones(rng: np.random.Generator) -> None:
    mesh = make_mesh(ep=2)
    x, router = draw(rng, 12, 16), draw(rng, 4, 16)
    banks = [draw(rng, 4, *shape) for shape in ((10, 16), (10, 16), (16, 10))]
    policy = op.numeric(dtype="fp8_e4m3", stochastic_round=True)
    layer = op.moe(num_experts=4, top_k=2, capacity_factor=4.0, policy=policy)
    arrays = [dist.distribute(x, mesh, REPLICATED, dims=TOKENS), dist.distribute(router, mesh, REPLICATED)]
    y = layer(*arrays, *(dist.distribute(bank, mesh, shard(experts="ep")) for bank in banks))
    assert relative_error(y.gather(), mix_experts(x, x.astype(np.float64) @ router.T, banks, 2)) < 0.05


def test_a_seed_belongs_to_stochastic_rounding() -> None:
    policy = op.numeric(dtype="bf16", stochastic_round=True, seed=9)
    assert (policy.stochastic_round, policy.seed) == (True, 9) and "seed=9" in repr(policy)
    plain = op.numeric(dtype="bf16")
    assert (plain.stochastic_round, plain.seed) == (False, None)
    for wrong in ({"dtype": "f32", "stochastic_round": True}, {"dtype": "bf16", "seed": 1}):
        with pytest.raises(TesseraError) as refused:
            op.numeric(**wrong)  # type: ignore[arg-type]
        assert refused.value.code == "T1505"
    with pytest.raises(TesseraError, match="2\\^40"):
        op.numeric(dtype="bf16", stochastic_round=True, seed=1 << 41)
    x = dist.distribute(np.ones((2, 2), np.float32), make_mesh(tp=1), REPLICATED)

    def two_seeds(x: graph.Value) -> graph.Value:
        layers = [op.linear(policy=op.numeric(dtype="bf16", stochastic_round=True, seed=n)) for n in (1, 2)]
        return layers[1](layers[0](x, x), x)

    with pytest.raises(TesseraError, match="two precisions"):
        graph.trace(two_seeds, x)
