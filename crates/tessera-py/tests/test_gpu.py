"""Programs on the GPUs of this host, beside numpy. Without a GPU they are skipped, unless TESSERA_REQUIRE_GPUS is set."""

from __future__ import annotations

import os

import numpy as np
import pytest
from helpers import REPLICATED, attend, draw, make_mesh, mix_experts, relative_error, shard
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt

GPUS = int(os.environ.get("TESSERA_REQUIRE_GPUS", "0"))


def open_on_gpus(plan: graph.Plan) -> rt.Session:
    """Loads a plan on GPUs, or skips the test where there are none."""
    try:
        return rt.open_session(plan, ranks="processes", device="gpu")
    except TesseraError as error:
        if GPUS >= plan.mesh.size:
            raise
        pytest.skip(f"{plan.mesh.size} GPUs: {error.code}, {error.message}")


MESHES = [{"tp": 1}, {"tp": 2}, {"ep": 2}]


@pytest.mark.parametrize("sizes", MESHES)
def test_a_block_equals_numpy(rng: np.random.Generator, sizes: dict[str, int]) -> None:
    mesh = make_mesh(**sizes)
    by_head = shard(col="tp") if "tp" in sizes else REPLICATED
    by_expert = shard(experts="ep") if "ep" in sizes else REPLICATED
    heads, width, experts, inner = 4, 256, 8, 96
    projections = [draw(rng, width, width) / 16 for _ in range(3)]
    router = draw(rng, experts, width) / 16
    banks = [draw(rng, experts, *shape) / 16 for shape in ((inner, width), (inner, width), (width, inner))]
    units = {"units": {"col": width // heads}}
    weights = [dist.distribute(w, mesh, by_head, **units) for w in projections]  # type: ignore[arg-type]
    spread = [dist.distribute(bank, mesh, by_expert) for bank in banks]
    gate = dist.distribute(router, mesh, REPLICATED)
    linear, attention = op.linear(), op.flash_attention(heads, width // heads, causal=True)
    mixture = op.moe(num_experts=experts, top_k=2, capacity_factor=float(experts))

    def block(x: graph.Value) -> graph.Value:
        return mixture(attention(*(linear(x, w) for w in weights)), gate, *spread)

    plan = graph.trace(block, graph.ArraySpec((48, width), mesh, dims=("token", "hidden"))).compile()
    x = draw(rng, 48, width)
    q, k, v = ((x.astype(np.float64) @ w.T).astype(np.float32) for w in projections)
    attended = attend(q, k, v, heads, causal=True).astype(np.float32)
    expected = mix_experts(attended, attended.astype(np.float64) @ router.T, banks, 2)
    with open_on_gpus(plan) as on_gpus:
        first, again = (on_gpus(x).gather() for _ in range(2))
    assert relative_error(first, expected) < 1e-5
    assert np.array_equal(first, again)
    with rt.open_session(plan) as on_threads:
        assert relative_error(on_threads(x).gather(), expected) < 1e-5


def test_redistribution_on_gpus_is_exact(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    silu = op.silu()
    spec = graph.ArraySpec((64, 32), mesh, shard(token="tp"), dims=("token", "hidden"))
    plan = graph.trace(lambda x: silu(x), spec).compile()
    x = draw(rng, 64, 32)
    with open_on_gpus(plan) as run:
        y = run(x)
    assert y.sharding == {"token": "tp"}
    assert relative_error(y.gather(), x / (1 + np.exp(-x.astype(np.float64)))) < 1e-6
