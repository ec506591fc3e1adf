"""``op.numeric(deterministic=True)``: no bit of a result depends on the mesh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import REPLICATED, draw, make_mesh, relative_error, shard, silu
from tessera import dist, graph, op
from tessera import runtime as rt

TOKENS = ("token", "hidden")
Arrays = list[np.ndarray]


def feed_forward(
    arrays: Arrays, mesh: dist.Mesh, policy: op.Numeric, tokens: dist.ShardSpec | dist.ReplicateSpec
) -> graph.Plan:
    """A column-parallel layer, a norm, and a row-parallel layer with a bias, added to its input."""
    x, up, norm, down, bias = arrays
    expand, normalize, project = op.linear(activation="silu", policy=policy), op.rms_norm(), op.linear(policy=policy)
    specs: list[dist.ShardSpec | dist.ReplicateSpec] = [shard(col="tp"), REPLICATED, shard(row="tp"), REPLICATED]
    held = [dist.distribute(a, mesh, spec) for a, spec in zip((up, norm, down, bias), specs, strict=True)]

    def layers(x: graph.Value) -> graph.Value:
        return project(expand(normalize(x, held[1]), held[0]), held[2], held[3]) + x

    return graph.trace(layers, graph.ArraySpec(x.shape, mesh, tokens, dims=TOKENS)).compile()


def draw_arrays(rng: np.random.Generator, inner: int) -> Arrays:
    return [draw(rng, *shape) for shape in ((6, 16), (inner, 16), (16,), (16, inner), (16,))]


@pytest.mark.parametrize("inner", [48, 20, 42, 33])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_bits_do_not_depend_on_the_mesh(rng: np.random.Generator, inner: int, dtype: str) -> None:
    """On one rank, on meshes with whole segments, on three ranks, and with tokens that are sharded too."""
    arrays = draw_arrays(rng, inner)
    policy = op.numeric(dtype, deterministic=True)
    found: Arrays = []
    for sizes in ({"tp": 1}, {"tp": 2}, {"tp": 4}, {"tp": 3}, {"tp": 2, "dp": 2}):
        tokens = shard(token="dp") if "dp" in sizes else REPLICATED
        plan = feed_forward(arrays, make_mesh(**sizes), policy, tokens)
        with rt.open_session(plan) as run:
            found.append(run(arrays[0]).gather())
    assert all(np.array_equal(found[0], other) for other in found[1:])
    if dtype == "f32":
        x, up, norm, down, bias = (a.astype(np.float64) for a in arrays)
        rows = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * norm
        assert relative_error(found[0], silu(rows @ up.T) @ down.T + bias + x) < 1e-6


def test_it_changes_the_reduction_of_the_plan(rng: np.random.Generator) -> None:
    arrays = draw_arrays(rng, 48)
    digests = set()
    for deterministic, reduction in ((True, "tree"), (False, "sum")):
        plan = feed_forward(arrays, make_mesh(tp=4), op.numeric(deterministic=deterministic), REPLICATED)
        assert [(name, axis) for name, axis, _ in plan.collectives()] == [("reduce_scatter", "tp")]
        assert f'reduction = "{reduction}"' in plan.text()
        assert ("segments = 2" in plan.text()) == deterministic
        assert plan.verify() and plan.seal()[0] == plan.digest
        digests.add(plan.digest)
    assert len(digests) == 2
    # Three ranks have no whole segments of 48, so they exchange operands and add no terms of a sum.
    plan = feed_forward(arrays, make_mesh(tp=3), op.numeric(deterministic=True), REPLICATED)
    assert {name for name, _, _ in plan.collectives()} == {"all_gather", "all_to_all"}


def test_processes_and_a_saved_plan_agree(rng: np.random.Generator, tmp_path: Path) -> None:
    arrays = draw_arrays(rng, 48)
    found: Arrays = []
    for tp in (1, 2):
        plan = feed_forward(arrays, make_mesh(tp=tp), op.numeric(deterministic=True), REPLICATED)
        with rt.open_session(plan, ranks="processes", oversubscribe=True) as run:
            found.append(run(arrays[0]).gather())
    assert np.array_equal(found[0], found[1])
    plan.save(str(tmp_path / "plan"))
    command = [sys.executable, "-m", "tessera", "check", str(tmp_path / "plan")]
    assert plan.digest[:12] in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_experts_on_more_ranks_give_the_bits_of_one(rng: np.random.Generator) -> None:
    x, router = draw(rng, 12, 8), draw(rng, 4, 8)
    banks = [draw(rng, 4, *shape) for shape in ((16, 8), (16, 8), (8, 16))]
    mixture = op.moe(num_experts=4, top_k=2, capacity_factor=4.0, policy=op.numeric(deterministic=True))
    found: Arrays = []
    for ep in (1, 2, 4):
        mesh = make_mesh(ep=ep)
        held = [dist.distribute(router, mesh, REPLICATED)]
        held += [dist.distribute(bank, mesh, shard(experts="ep")) for bank in banks]
        spec = graph.ArraySpec((12, 8), mesh, dims=TOKENS)
        plan = graph.trace(lambda x, held=held: mixture(x, *held), spec).compile()
        with rt.open_session(plan) as run:
            found.append(run(x).gather())
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_one_layer_makes_its_plan_deterministic() -> None:
    assert not op.numeric().deterministic
    mesh = make_mesh(tp=2)
    w = dist.distribute(np.ones((8, 8), np.float32), mesh, shard(row="tp"))
    stated, other = op.linear(policy=op.numeric(deterministic=True)), op.linear(policy=op.numeric())
    spec = graph.ArraySpec((6, 8), mesh, dims=TOKENS)
    for first, second in ((stated, other), (other, stated)):
        plan = graph.trace(lambda x, f=first, s=second: s(f(x, w), w), spec).compile()
        assert plan.text().count('reduction = "tree"') == 2 and 'reduction = "sum"' not in plan.text()
