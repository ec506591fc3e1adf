"""Traced functions: their plans, and their results on ranks beside numpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import REPLICATED, attend, draw, make_mesh, mix_experts, relative_error, shard, silu
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt

TOKENS = ("token", "hidden")


def test_a_column_and_a_row_parallel_layer_need_one_reduction(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=4)
    x, up, down = draw(rng, 6, 8), draw(rng, 20, 8), draw(rng, 8, 20)
    wide = dist.distribute(up, mesh, shard(col="tp"))
    narrow = dist.distribute(down, mesh, shard(row="tp"))
    open_layer, close = op.linear(activation="silu"), op.linear()

    def feed_forward(x: graph.Value) -> graph.Value:
        return close(open_layer(x, wide), narrow)

    plan = graph.trace(feed_forward, graph.ArraySpec((6, 8), mesh, dims=TOKENS)).compile()
    assert [(name, axis) for name, axis, _ in plan.collectives()] == [("all_reduce", "tp")]
    expected = silu(x.astype(np.float64) @ up.T) @ down.T
    with rt.open_session(plan) as run:
        for scale in (1, 2):
            found = run(x=np.float32(scale) * x).gather()
            wanted = silu(scale * x.astype(np.float64) @ up.T) @ down.T
            assert relative_error(found, wanted) < 1e-6
        assert relative_error(run(x).gather(), expected) < 1e-6
    assert plan.digest in plan.explain() and any("no deadlock" in line for line in plan.verify())
    assert "shard" in plan.text(rank=3)


def test_ops_run_at_once_on_arrays(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2, ep=3)
    x, w, bias, norm = draw(rng, 7, 10), draw(rng, 9, 10), draw(rng, 9), draw(rng, 9)
    x_tensor = dist.distribute(x, mesh, shard(token="ep"), dims=TOKENS)
    spread = [dist.distribute(a, mesh, shard(col="tp")) for a in (w, bias)]
    y = op.linear()(x_tensor, *spread)
    expected = x.astype(np.float64) @ w.T + bias
    assert relative_error(y.gather(), expected) < 1e-6
    assert y.sharding == {"token": "ep", "col": "tp"}
    z = op.rms_norm(eps=1e-6)(y + y, dist.distribute(norm, mesh, REPLICATED))
    doubled = 2 * expected
    root = np.sqrt((doubled**2).mean(axis=1, keepdims=True) + 1e-6)
    assert relative_error(z.gather(), doubled / root * norm) < 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 5])
def test_attention_with_sharded_heads(rng: np.random.Generator, causal: bool, heads: int) -> None:
    mesh = make_mesh(tp=2)
    q, k, v = (draw(rng, 9, heads * 8) for _ in range(3))
    keys = dist.ShardSpec(partition=("col",), mesh_axes=("tp",))
    layer = op.flash_attention(
        num_heads=heads, head_dim=8, causal=causal, q_layout=REPLICATED, k_layout=keys, v_layout=keys
    )
    names = {"dims": ("token", "head"), "units": {"head": 8}}
    queries = dist.distribute(q, mesh, REPLICATED, **names)  # type: ignore[arg-type]
    spread = [dist.distribute(a, mesh, shard(head="tp"), **names) for a in (k, v)]  # type: ignore[arg-type]
    y = layer(queries, *spread)
    assert relative_error(y.gather(), attend(q, k, v, heads, causal)) < 1e-6
    assert y.sharding == {"head": "tp"}


@pytest.mark.parametrize(("sizes", "experts", "top_k"), [({"ep": 2}, 5, 2), ({"tp": 2, "ep": 2}, 8, 1)])
def test_experts_equal_a_dense_reference(
    rng: np.random.Generator, sizes: dict[str, int], experts: int, top_k: int
) -> None:
    mesh = make_mesh(**sizes)
    x, router = draw(rng, 12, 6), draw(rng, experts, 6)
    banks = [draw(rng, experts, *shape) for shape in ((10, 6), (10, 6), (6, 10))]
    layer = op.moe(num_experts=experts, top_k=top_k, capacity_factor=float(experts))
    spread = [dist.distribute(bank, mesh, shard(experts="ep")) for bank in banks]
    tokens = dist.distribute(x, mesh, REPLICATED, dims=TOKENS)
    y = layer(tokens, dist.distribute(router, mesh, REPLICATED), *spread)
    logits = x.astype(np.float64) @ router.T
    assert relative_error(y.gather(), mix_experts(x, logits, banks, top_k)) < 1e-6
    chosen = layer.route(tokens, dist.distribute(router, mesh, REPLICATED)).gather()
    assert np.array_equal(chosen, np.argsort(-logits, axis=1, kind="stable")[:, :top_k])


def test_processes_return_the_bits_of_threads(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    w = dist.distribute(draw(rng, 6, 5), mesh, shard(row="tp"))
    linear = op.linear()

    def project(x: graph.Value) -> graph.Value:
        return linear(x, w)

    plan = graph.trace(project, graph.ArraySpec((4, 5), mesh, dims=TOKENS)).compile()
    x = draw(rng, 4, 5)
    with rt.open_session(plan) as threads, rt.open_session(plan, ranks="processes", oversubscribe=True) as run:
        assert len(run.process_ids) == 2
        assert np.array_equal(threads(x).gather(), run(x).gather())


def test_a_saved_plan_is_proved_again(rng: np.random.Generator, tmp_path: Path) -> None:
    mesh = make_mesh(tp=2)
    w = dist.distribute(draw(rng, 8, 8), mesh, shard(row="tp"))
    linear, attention = op.linear(), op.flash_attention(2, 4, causal=True)
    spec = graph.ArraySpec((6, 8), mesh, dims=TOKENS)
    plan = graph.trace(lambda x: linear(attention(x, x, x), w), spec).compile()
    plan.save(str(tmp_path / "plan"))

    def check() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tessera", "check", str(tmp_path / "plan")]
        return subprocess.run(command, capture_output=True, text=True)

    assert plan.digest[:12] in check().stdout
    program = next((tmp_path / "plan" / "programs").iterdir())
    program.write_text(program.read_text().replace("all_reduce", "all_gather").replace("reduction", "dim"))
    assert check().returncode == 1
    with pytest.raises(TesseraError) as exists:
        plan.save(str(tmp_path / "plan"))
    assert exists.value.code == "T0013"


def test_a_program_says_what_it_refuses(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    w = dist.distribute(draw(rng, 6, 5), mesh, REPLICATED)
    other = dist.distribute(draw(rng, 6, 5), make_mesh(ep=2), REPLICATED)
    linear = op.linear()
    spec = graph.ArraySpec((4, 7), mesh, dims=TOKENS)
    with pytest.raises(TesseraError) as refused:
        graph.trace(lambda x: linear(x, w), spec)
    assert refused.value.code == "T0210" and "7" in str(refused.value) and "5" in str(refused.value)
    with pytest.raises(TesseraError, match="two meshes"):
        graph.trace(lambda x: linear(x, other), spec)
    with pytest.raises(TesseraError, match="returned a int"):
        graph.trace(lambda x: 3, spec)
    with pytest.raises(TypeError, match="truth value"):
        graph.trace(lambda x: x if x else x, spec)
    with pytest.raises(TypeError, match="takes 2 or 3 operands"):
        linear(w)


def test_views_of_one_array_are_weights_of_their_own(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    whole = draw(rng, 8, 4)
    w = dist.distribute(whole, mesh, REPLICATED)
    half = dist.distribute(whole[:4], mesh, REPLICATED)
    linear = op.linear()
    spec = graph.ArraySpec((2, 4), mesh, dims=TOKENS)
    plan = graph.trace(lambda x: (linear(x, w), linear(x, half), linear(x, w)), spec).compile()
    assert len(plan.graphs[0].weights) == 2
    x = draw(rng, 2, 4)
    with rt.open_session(plan) as run:
        assert [y.shape for y in run(x)] == [(2, 8), (2, 4), (2, 8)]
        x += 1  # inputs of a call stay writeable
        assert relative_error(run(x)[1].gather(), x.astype(np.float64) @ whole[:4].T) < 1e-6


def test_a_trace_that_has_ended_takes_no_op(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    w = dist.distribute(draw(rng, 6, 5), mesh, REPLICATED)
    linear, silu_layer = op.linear(), op.silu()
    kept: list[graph.Value] = []
    spec = graph.ArraySpec((4, 5), mesh, dims=TOKENS)
    graph.trace(lambda x: kept.append(x) or silu_layer(x), spec)  # type: ignore[func-returns-value]
    assert "ended" in repr(kept[0])
    for use in (lambda: linear(kept[0], w), lambda: kept[0] + 1.0, lambda: kept[0].shape):
        with pytest.raises(TesseraError, match="has ended") as refused:
            use()
        assert refused.value.code == "T1504"

    def go_on(x: graph.Value) -> graph.Value:
        try:
            return linear(x, dist.distribute(draw(rng, 6, 4), mesh, REPLICATED))
        except TesseraError:
            return linear(x, w)

    with pytest.raises(TesseraError, match="failed"):
        graph.trace(go_on, spec)


def test_wrong_attention_is_refused(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    x = dist.distribute(draw(rng, 6, 8), mesh, REPLICATED, dims=TOKENS)
    for layer, words in (
        (op.flash_attention(3, 4), "3 heads of 4"),
        (op.flash_attention(2**40, 2**40), "columns"),
        (op.flash_attention(2, 4, causal=True, sequences=4), "sequences"),
    ):
        with pytest.raises(TesseraError, match=words):
            layer(x, x, x)
    stated = op.flash_attention(2, 4, q_layout=shard(col="tp"), k_layout=REPLICATED)
    with pytest.raises(TesseraError, match="two layouts"):
        graph.trace(lambda x: stated(x, x, x), graph.ArraySpec((6, 8), mesh, dims=TOKENS))
    mixture = op.moe(num_experts=4, top_k=1)
    with pytest.raises(TesseraError, match="4 experts"):
        mixture.route(x, dist.distribute(draw(rng, 6, 8), mesh, REPLICATED))
    with pytest.raises(TesseraError, match="no operand has one"):
        penalized = op.moe(4, 1, gate="topk_softmax_locality_penalized")
        graph.trace(lambda x, r: penalized.route(x, r), graph.ArraySpec((6, 8)), graph.ArraySpec((4, 8)))


def test_numbers_combine_with_values_from_both_sides(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    x, y = draw(rng, 3, 4), draw(rng, 3, 4)
    other = dist.distribute(y.copy(), mesh, shard(token="tp"), dims=TOKENS)
    spec = graph.ArraySpec((3, 4), mesh, shard(token="tp"), dims=TOKENS)
    plan = graph.trace(lambda x: (1.0 - x, x - other, -x * 2.0), spec).compile()
    with rt.open_session(plan) as run:
        found = [value.gather() for value in run(x)]
    for one, exact in zip(found, (1 - x, x - y, -2 * x), strict=True):
        assert np.allclose(one, exact, atol=1e-6)
    assert plan.collectives() == []


def test_a_plan_keeps_the_settings_with_which_it_was_made(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    w = dist.distribute(draw(rng, 8, 8), mesh, shard(row="tp"))
    linear = op.linear()
    whole = dist.distribute(draw(rng, 8, 8), mesh, REPLICATED)

    def two_branches(x: graph.Value) -> tuple[graph.Value, graph.Value]:
        # The other matmul can run while the terms of this one are added, if both streams may.
        terms = linear(x, w)
        other = linear(x, whole)
        return linear(terms, whole), other

    traced = graph.trace(two_branches, graph.ArraySpec((6, 8), mesh, dims=TOKENS))
    plan = traced.compile(cluster="hgx-h200")
    before = (plan.verify(), plan.seal(), plan.why(tp=2), plan.why(ep=2))
    rt.enable_overlap([("tp_collective", "compute")])
    try:
        assert (plan.verify(), plan.seal(), plan.why(tp=2), plan.why(ep=2)) == before
        assert traced.compile().digest != plan.digest
    finally:
        rt.enable_overlap([])


def test_inputs_of_a_call_are_checked(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    silu_layer = op.silu()
    plan = graph.trace(lambda x: silu_layer(x), graph.ArraySpec((4, 6), mesh, dims=TOKENS)).compile()
    x = draw(rng, 4, 6)
    with rt.open_session(plan) as run:
        for wrong in ({}, {"y": draw(rng, 4, 6)}, {"x": draw(rng, 4, 5)}):
            with pytest.raises(TesseraError) as refused:
                run(**wrong)
            assert refused.value.code == "T0091"
        assert relative_error(run(x).gather(), silu(x.astype(np.float64))) < 1e-6
    with pytest.raises(RuntimeError, match="closed"):
        run(x)
