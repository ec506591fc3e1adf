"""Planning by estimate: recipes, machines and the memory table of the mapping guide."""

import numpy as np
import pytest
from helpers import draw, make_mesh, shard
from tessera import TesseraError, graph, op


def test_a_recipe_has_the_mesh_of_the_guide() -> None:
    recipe = graph.recipe("A")
    assert recipe.mesh is not None
    assert recipe.mesh.shape == {"tp": 12, "ep": 6, "pp": 1, "dp": 1}
    assert recipe.mesh.devices[71] == "GPU71"
    assert "attention-heavy" in str(recipe)
    refused = recipe.why(tp=16, ep=9)
    assert "refused" in refused and "144" in refused
    with pytest.raises(TesseraError) as unknown:
        graph.recipe("Z")
    assert unknown.value.code == "T1229"


def test_a_rack_has_the_devices_of_the_guide() -> None:
    rack = graph.topology("nvl72")
    assert (rack.devices, rack.domain_size) == (72, 72)
    assert rack.memory_bytes > 180e9
    assert graph.topology("hgx-h200").devices == 8
    with pytest.raises(TesseraError) as unknown:
        graph.topology("nvl73")
    assert unknown.value.code == "T1104"


def test_memory_is_counted_per_token() -> None:
    rows = graph.plan_memory(P=1e9, A=2e5, K=4096, E=64, H=192e9, tokens=8192, layers=2, tp=2, ep=8, expert_parameters=1e7)
    by_term = {term: bytes_ for term, _, bytes_, _ in rows}
    assert by_term["parameters (P)"] == 1e9 * 2 * 2 / 2
    assert by_term["experts (E)"] == 8 * 1e7 * 2 * 2
    assert by_term["activations (A)"] == 2e5 * 8192 * 2 / 2
    assert by_term["cache (K)"] == 4096 * 8192 * 2 / 2
    assert by_term["total"] + by_term["left of H"] == 192e9
    with pytest.raises(TypeError, match="tokens"):
        graph.plan_memory(P=1, A=1, K=1, E=1, H=1)  # type: ignore[call-arg]


def test_a_plan_is_estimated_on_a_machine_that_is_not_here(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=4)
    from tessera import dist

    w = dist.distribute(draw(rng, 64, 64), mesh, shard(row="tp"))
    linear = op.linear()
    plan = graph.trace(lambda x: linear(x, w), graph.ArraySpec((128, 64), mesh, dims=("token", "hidden"))).compile()
    slow, fast = (plan.estimate(cluster) for cluster in ("laptop", "nvl72"))
    assert fast[0] < slow[0] and 0 < fast[1] <= fast[0]
    assert fast[3] >= 2 * 128 * 64 * 64
    assert "estimate of a call on nvl72" in plan.report("nvl72")
