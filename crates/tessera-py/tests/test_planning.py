"""Planning by estimate: recipes, machines and the memory table of the mapping guide."""

import numpy as np
import pytest
from helpers import draw, make_mesh, relative_error, shard, silu
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt


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
    w = dist.distribute(draw(rng, 64, 64), mesh, shard(row="tp"))
    linear = op.linear()
    plan = graph.trace(lambda x: linear(x, w), graph.ArraySpec((128, 64), mesh, dims=("token", "hidden"))).compile()
    slow, fast = (plan.estimate(cluster) for cluster in ("laptop", "nvl72"))
    assert fast.ns < slow.ns and 0 < fast.exposed_ns <= fast.ns and fast.sent_bytes > 0
    assert fast.flops >= 2 * 128 * 64 * 64 and f"ns={fast.ns:.0f}" in repr(fast)
    assert "estimate of a call on nvl72" in plan.report("nvl72")


TOKENS = ("token", "hidden")


def trace_feed_forward(
    rng: np.random.Generator, mesh: dist.Mesh, tokens: int = 48, width: int = 96, inner: int = 144
) -> graph.Graph:
    """Returns two layers over tp, whose tokens are divided over ep."""
    up = dist.distribute(draw(rng, inner, width), mesh, shard(col="tp"))
    down = dist.distribute(draw(rng, width, inner), mesh, shard(row="tp"))
    opened, closed = op.linear(activation="silu"), op.linear()
    spec = graph.ArraySpec((tokens, width), mesh, shard(token="ep"), dims=TOKENS)
    return graph.trace(lambda x: closed(opened(x, up), down), spec, name="feed_forward")


def test_a_function_runs_on_every_mesh_of_its_axes(rng: np.random.Generator) -> None:
    tokens, width, inner = 7, 10, 9
    up, down, x = draw(rng, inner, width), draw(rng, width, inner), draw(rng, tokens, width)
    # On one rank nothing is sharded yet, and the function still knows which axis shards what.
    one = make_mesh(tp=1, ep=1)
    opened, closed = op.linear(activation="silu"), op.linear()
    first = dist.distribute(up, one, shard(col="tp"))
    second = dist.distribute(down, one, shard(row="tp"))
    assert first.sharding == {}
    spec = graph.ArraySpec((tokens, width), one, shard(token="ep"), dims=TOKENS)
    traced = graph.trace(lambda x: closed(opened(x, first), second), spec)
    expected = silu(x.astype(np.float64) @ up.T) @ down.T
    digests = set()
    for sizes in ({"tp": 1, "ep": 1}, {"tp": 2, "ep": 3}, {"tp": 4, "ep": 1}, {"tp": 1, "ep": 2}):
        plan = traced.compile(mesh=make_mesh(**sizes))
        assert plan.mesh.shape == sizes
        digests.add(plan.digest)
        with rt.open_session(plan) as run:
            assert relative_error(run(x).gather(), expected) < 1e-6
    assert len(digests) == 4
    wide = traced.compile(mesh=make_mesh(tp=2, ep=3))
    assert "source program.w0: dim 0 over tp" in wide.explain() and "source x: dim 0 over ep" in wide.explain()
    with pytest.raises(TesseraError) as lacking:
        traced.compile(mesh=make_mesh(tp=2))
    assert lacking.value.code == "T1510" and "ep" in str(lacking.value)
    with pytest.raises(TesseraError) as large:
        traced.compile(mesh=make_mesh(tp=10, ep=1))
    assert large.value.code == "T0107" and "extent 9" in str(large.value)


def test_heads_stay_whole_on_another_mesh(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=5)
    q = dist.distribute(draw(rng, 20, 20), mesh, shard(col="tp"), units={"col": 4})
    linear = op.linear()
    traced = graph.trace(lambda x: linear(x, q), graph.ArraySpec((3, 20), mesh, dims=TOKENS))
    # 20 columns are divided evenly over 5 ranks, and over 2 ranks as 3 heads and 2 heads of 4 columns.
    assert "f32[12, 20]" in traced.compile(mesh=make_mesh(tp=2)).text(rank=0)
    assert "f32[8, 20]" in traced.compile(mesh=make_mesh(tp=2)).text(rank=1)


def test_a_cluster_searches_the_mesh(rng: np.random.Generator) -> None:
    traced = trace_feed_forward(rng, make_mesh(tp=1, ep=1))
    plan = traced.compile(cluster="gb200-nvl72", objective="latency")
    shape = plan.mesh.shape
    assert shape["tp"] * shape["ep"] == 72
    table = plan.explain()
    assert "of 12 are legal" in table and "<- this plan" in table and "T0107" in table
    # The chosen mesh is the fastest of all that compile, by the estimate that every plan has.
    fastest = plan.estimate().ns
    for tp in (1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72):
        sizes = {"tp": tp, "ep": 72 // tp}
        answer = plan.why(**sizes)
        try:
            other = traced.compile(mesh=make_mesh(**sizes), cluster="gb200-nvl72")
        except TesseraError as refused:
            assert refused.code == "T0107" and "refused" in answer and "T0107" in answer
        else:
            assert other.estimate().ns >= fastest and "legal" in answer
    with rt.open_session(traced.compile(cluster="gb200-nvl72", objective="latency", devices=4)) as run:
        assert run.plan.mesh.size == 4
        assert run(draw(rng, 48, 96)).shape == (48, 96)


def test_memory_prefers_other_meshes_than_latency(rng: np.random.Generator) -> None:
    # Long inputs and a small layer: tokens are worth dividing for memory.
    traced = trace_feed_forward(rng, make_mesh(tp=1, ep=1), tokens=4096, width=64, inner=64)
    least = traced.compile(cluster="hgx-h200", objective="memory")
    peaks = {}
    for tp in (1, 2, 4, 8):
        plan = traced.compile(mesh=make_mesh(tp=tp, ep=8 // tp), cluster="hgx-h200")
        peaks[tp] = max(sum(rank) for rank in plan.memory())
    assert peaks[least.mesh.shape["tp"]] == min(peaks.values())
    assert "the smallest memory" in least.explain()


def test_why_names_the_constraint_with_its_numbers(rng: np.random.Generator) -> None:
    traced = trace_feed_forward(rng, make_mesh(tp=2, ep=4))
    plan = traced.compile(cluster="hgx-h200")
    same = plan.why(tp=2, ep=4)
    assert "legal" in same and "this is the mesh of the plan" in same
    other = plan.why(tp=8)
    assert "legal" in other and "in total" in other and "waiting for collectives" in other
    assert "12·6 = 72 ranks, 8 devices (T1201)" in plan.why(tp=12, ep=6)
    with pytest.raises(TesseraError) as unknown:
        plan.why(up=2)
    assert unknown.value.code == "T0101"
    with pytest.raises(TesseraError) as nowhere:
        traced.compile().why(tp=8)
    assert nowhere.value.code == "T1508"


def test_a_machine_refuses_what_it_cannot_run(rng: np.random.Generator) -> None:
    traced = trace_feed_forward(rng, make_mesh(tp=4, ep=4))
    with pytest.raises(TesseraError) as many:
        traced.compile(cluster="hgx-h200")
    assert many.value.code == "T1201" and "16 ranks" in str(many.value) and "8 devices" in str(many.value)
    # Nothing is computed: an input of 400 GB is a number of a program.
    mesh = make_mesh(tp=2)
    silu_layer = op.silu()
    huge = graph.trace(lambda x: silu_layer(x), graph.ArraySpec((10**6, 10**5), mesh, shard(token="tp"), dims=TOKENS))
    with pytest.raises(TesseraError) as full:
        huge.compile(cluster="hgx-h200")
    assert full.value.code == "T1217" and "GiB" in str(full.value)
    with pytest.raises(TesseraError) as none:
        huge.compile(cluster="hgx-h200", objective="latency", devices=1)
    assert none.value.code == "T1242" and any("T1217" in note for note in none.value.notes)
    for devices in (0, 9):
        with pytest.raises(TesseraError) as count:
            traced.compile(cluster="hgx-h200", objective="latency", devices=devices)
        assert count.value.code == "T1201" and f"{devices} devices" in str(count.value)
    # An estimate says what a machine would take, also if it has too little memory.
    assert huge.compile().estimate("hgx-h200").ns > 0
    for wrong in ({"objective": "latency"}, {"cluster": "hgx-h200", "objective": "beauty"}):
        with pytest.raises(TesseraError) as refused:
            traced.compile(**wrong)  # type: ignore[arg-type]
        assert refused.value.code == "T1508"
    with pytest.raises(TesseraError) as both:
        traced.compile(mesh=make_mesh(tp=2, ep=2), cluster="hgx-h200", objective="latency", devices=4)
    assert both.value.code == "T1508"


def test_a_plan_knows_its_machine(rng: np.random.Generator) -> None:
    plan = trace_feed_forward(rng, make_mesh(tp=2, ep=2)).compile(cluster="nvl72")
    assert "estimate of a call on nvl72" in plan.report()
    assert plan.estimate() == plan.estimate("gb200-nvl72") != plan.estimate("laptop")
    proved = plan.verify()
    assert any(line.startswith("no deadlock") and "T0311" in line for line in proved)
    digest, parts = plan.seal()
    assert digest == plan.digest and parts["mesh"] == "tp=2, ep=2"
    other = trace_feed_forward(rng, make_mesh(tp=2, ep=2)).compile(mesh=make_mesh(tp=4, ep=1))
    other_digest, other_parts = other.seal()
    differing = {name for name in parts if other_parts.get(name) != parts[name]}
    assert other_digest != digest and "mesh" in differing and any(name.startswith("program") for name in differing)
    again = trace_feed_forward(rng, make_mesh(tp=2, ep=2)).compile()
    assert again.seal() == (digest, parts)


def test_a_plan_states_the_path_of_every_group_of_its_hosts(rng: np.random.Generator) -> None:
    function = trace_feed_forward(rng, make_mesh(tp=4, ep=1))
    bare = function.compile()
    assert bare.group_paths == {} and function.compile(hosts=[]).digest == bare.digest
    digests = {bare.digest}
    for hosts, path in (([4], "peer memory"), ([2, 2], "hierarchical"), ([1, 1, 1, 1], "network")):
        plan = function.compile(hosts=hosts)
        assert list(plan.group_paths.values()) == [path] and "over tp of ranks 0, 1, 2, 3" in str(plan.group_paths)
        assert plan.verify()
        digests.add(plan.digest)
    assert len(digests) == 4
    for wrong in ([3], [2, 2, 1], [4, 0]):
        with pytest.raises(TesseraError) as refused:
            function.compile(hosts=wrong)
        assert refused.value.code == "T0605"
