"""The snippets of the mapping guide: as printed, plus only the imports and arguments that the text leaves out.

Each runs at the guide's size as far as it makes objects, and at a reduced size on ranks, beside numpy.
"""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
from helpers import REPLICATED, attend, draw, draw_weight, make_mesh, mix_experts, relative_error, shard
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt

MESH_AND_LAYOUTS = """
from tessera import dist, op, graph, runtime as rt

# Recipe A: tp=12, ep=6, pp=1, dp=1 over 72 GPUs
mesh = dist.Mesh(
    axes=["tp","ep","pp","dp"],
    shape={"tp":12, "ep":6, "pp":1, "dp":1},
    devices=[f"GPU{i}" for i in range(72)]
)

# Layouts
Rep     = dist.ReplicateSpec(mesh_axes=("tp","ep","pp","dp"))
ColTP   = dist.ShardSpec(partition=("col",),   mesh_axes=("tp",))
RowTP   = dist.ShardSpec(partition=("row",),   mesh_axes=("tp",))
ExpertE = dist.ShardSpec(partition=("experts",), mesh_axes=("ep",))

# Numerics
POLICY_TRAIN = op.numeric(dtype="fp8_e4m3", accum="f32", deterministic=True)

# Attention w/ KV sharded over tp
Attn = op.flash_attention(
    num_heads=128, head_dim=128, causal=True, policy=POLICY_TRAIN,
    q_layout=Rep, k_layout=ColTP, v_layout=ColTP
)

# MoE (A2A inside ep)
MoE = op.moe(
    num_experts=4096, top_k=2, capacity_factor=1.25,
    gate="topk_softmax_locality_penalized", experts_layout=ExpertE,
    policy=POLICY_TRAIN
)

# Router cost regularizer (discourage far experts)
op.set_router_regularizer(MoE, kind="topology_distance", weight=0.05)
"""

STREAMS = """
rt.set_stream_map({
  "compute": 0, "tp_collective": 1, "a2a": 2, "io": 3
})
rt.enable_overlap([("a2a","compute"), ("tp_collective","compute")])
"""

ROUTER = """
def locality_cost(expert_id, my_group):
    # precomputed mapping expert->group
    return 0.0 if expert_to_group[expert_id] == my_group else 1.0

MoE = op.moe(**arguments)
op.set_router(MoE, lambda logits, meta: logits - 0.05 * meta.apply(locality_cost))
"""


PREFETCH = """
rt.register_prefetch(MoE, window=2, tier_order=["HBM","Grace"], policy="lru_hotness", stream="io")
"""


STOCHASTIC_NUMERICS = """
POLICY = op.numeric(
  dtype="fp8_e4m3",
  accum="f32",
  scale="per_channel",
  stochastic_round=True,
  deterministic=True
)
"""


def run_snippet(text: str, **names: object) -> dict[str, object]:
    """Runs a snippet and returns its names."""
    scope: dict[str, object] = {"dist": dist, "op": op, "graph": graph, "rt": rt, **names}
    exec(text, scope)
    return scope


def test_mesh_and_layouts_as_printed() -> None:
    names = run_snippet(MESH_AND_LAYOUTS)
    mesh = names["mesh"]
    assert isinstance(mesh, dist.Mesh) and mesh.size == 72
    assert repr(names["MoE"]) == "moe(num_experts=4096, top_k=2, gate=\"topk_softmax_locality_penalized\")"
    assert names["MoE"].capacity(tokens=8192) == 5  # type: ignore[attr-defined]


def test_the_same_layers_plan_72_devices_and_run_on_4(rng: np.random.Generator) -> None:
    """The layers of one function, planned for the rack of the guide and run on 4 ranks at a reduced size."""

    def plan_block(mesh: dist.Mesh, tokens: int, heads: int, experts: int) -> tuple[graph.Plan, list[np.ndarray]]:
        width = heads * 4
        arrays = [draw_weight(rng, width, width) for _ in range(3)] + [draw_weight(rng, experts, width)]
        arrays += [draw_weight(rng, experts, *shape) for shape in ((6, width), (6, width), (width, 6))]
        col, whole, spread = shard(col="tp"), REPLICATED, shard(experts="ep")
        units = {"units": {"col": 4}}
        weights = [dist.distribute(a, mesh, col, **units) for a in arrays[:3]]  # type: ignore[arg-type]
        router = dist.distribute(arrays[3], mesh, whole)
        banks = [dist.distribute(bank, mesh, spread) for bank in arrays[4:]]
        linear, attention = op.linear(), op.flash_attention(heads, 4, causal=True)
        mixture = op.moe(num_experts=experts, top_k=2, capacity_factor=float(experts))

        def block(x: graph.Value) -> graph.Value:
            q, k, v = (linear(x, w) for w in weights)
            return mixture(attention(q, k, v), router, *banks)

        return graph.trace(block, graph.ArraySpec((tokens, width), mesh, dims=("token", "hidden"))).compile(), arrays

    rack = run_snippet(MESH_AND_LAYOUTS)["mesh"]
    assert isinstance(rack, dist.Mesh)
    plan, _ = plan_block(rack, tokens=16, heads=14, experts=12)
    assert plan.mesh.size == 72 and len(plan.memory()) == 72
    plan, arrays = plan_block(make_mesh(tp=2, ep=2), tokens=10, heads=4, experts=6)
    x = draw(rng, 10, 16)
    q, k, v = (x.astype(np.float64) @ w.T for w in arrays[:3])
    attended = attend(q, k, v, 4, causal=True)
    expected = mix_experts(attended, attended @ arrays[3].T, arrays[4:], 2)
    with rt.open_session(plan) as run:
        assert relative_error(run(x).gather(), expected) < 1e-6


def test_streams_as_printed() -> None:
    run_snippet(STREAMS)
    ids, pairs = rt.stream_settings()
    assert ids == {"compute": 0, "tp_collective": 1, "a2a": 2, "io": 3}
    assert pairs == [("a2a", "compute"), ("tp_collective", "compute")]
    rt.enable_overlap([])
    for wrong in (
        {"compute": 0, "tp_collective": 1, "a2a": 2},
        {"compute": 0, "tp_collective": 1, "a2a": 2, "io": 2},
        {"compute": 0, "tp_collective": 1, "a2a": 2, "io": 3, "copy": 4},
    ):
        with pytest.raises(TesseraError) as refused:
            rt.set_stream_map(wrong)
        assert refused.value.code == "T1506"
    with pytest.raises(TesseraError):
        rt.enable_overlap([("a2a", "communicate")])


def test_only_listed_streams_overlap(rng: np.random.Generator) -> None:
    """Without a listed pair, the wait for a collective follows its issue; with it, independent ops come between."""
    mesh = make_mesh(tp=2)
    x, w = draw(rng, 6, 8), draw(rng, 8, 8)
    spread = dist.distribute(w, mesh, shard(row="tp"))
    linear, act = op.linear(), op.silu()

    def two_branches(x: graph.Value, y: graph.Value) -> graph.Value:
        return linear(x, spread) + act(act(y))

    spec = graph.ArraySpec((6, 8), mesh, dims=("token", "hidden"))
    results: list[np.ndarray] = []
    for pairs in ([], [("tp_collective", "compute")]):
        rt.enable_overlap(pairs)
        plan = graph.trace(two_branches, spec, spec).compile()
        lines = plan.text().splitlines()
        issue = next(i for i, line in enumerate(lines) if "collective.issue" in line)
        wait = next(i for i, line in enumerate(lines) if "collective.wait" in line)
        # Without the pair, the wait follows; with it, the ops of the other branch come between.
        assert (wait - issue > 1) == bool(pairs)
        with rt.open_session(plan) as run:
            results.append(run(x, x).gather())
    rt.enable_overlap([])
    assert np.array_equal(results[0], results[1])


def test_router_as_printed(rng: np.random.Generator) -> None:
    mesh = make_mesh(ep=2)
    arguments = {"num_experts": 4, "top_k": 2, "capacity_factor": 4.0}
    names = run_snippet(ROUTER, arguments=arguments, expert_to_group=[0, 0, 1, 1])
    mixture = names["MoE"]
    assert isinstance(mixture, op.Moe)
    x, router = draw(rng, 6, 5), draw(rng, 4, 5) / 10
    banks = [draw(rng, 4, *shape) for shape in ((3, 5), (3, 5), (5, 3))]
    y = mixture(
        dist.distribute(x, mesh, REPLICATED, dims=("token", "hidden")),
        dist.distribute(router, mesh, REPLICATED),
        *(dist.distribute(bank, mesh, shard(experts="ep")) for bank in banks),
    )
    cost = np.array([[0, 0, 1, 1]] * 3 + [[1, 1, 0, 0]] * 3)
    logits = x.astype(np.float64) @ router.T - 0.05 * cost
    assert relative_error(y.gather(), mix_experts(x, logits, banks, 2)) < 1e-6


def test_a_router_may_be_set_while_it_runs(rng: np.random.Generator) -> None:
    mesh = make_mesh(ep=2)
    mixture = op.moe(num_experts=4, top_k=1)
    arrays = [dist.distribute(draw(rng, n, 5), mesh, REPLICATED) for n in (6, 4)]

    def once(logits: graph.Value, meta: op.RouterMeta) -> graph.Value:
        op.set_router(mixture, lambda logits, meta: logits)
        return logits + 1.0

    op.set_router(mixture, once)
    first, second = (mixture.route(*arrays).gather() for _ in range(2))
    assert np.array_equal(first, second)


def test_a_router_that_fails_names_token_and_expert(rng: np.random.Generator) -> None:
    mesh = make_mesh(ep=2)
    mixture = op.moe(num_experts=4, top_k=1)

    def cost(expert: int, group: int) -> float:
        return 1 / (1 - group * (expert == 2))

    op.set_router(mixture, lambda logits, meta: logits - meta.apply(cost))
    arrays = [dist.distribute(draw(rng, n, 5), mesh, REPLICATED) for n in (6, 4)]
    with pytest.raises(TesseraError, match="expert 2 for token 3") as failed:
        mixture.route(*arrays)
    assert failed.value.code == "T1507" and isinstance(failed.value.__cause__, ZeroDivisionError)


def test_two_penalties_warn_with_their_sum(rng: np.random.Generator) -> None:
    mesh = make_mesh(ep=2)
    mixture = op.moe(num_experts=4, top_k=1, gate="topk_softmax_locality_penalized")
    home = [0, 0, 1, 1]
    op.set_router(mixture, lambda logits, meta: logits - 0.05 * meta.apply(lambda e, g: float(home[e] != g)))
    arrays = [dist.distribute(draw(rng, n, 5), mesh, REPLICATED) for n in (6, 4)]
    with pytest.warns(RuntimeWarning, match="up to 0.1000"):
        mixture.route(*arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op.moe(num_experts=4, top_k=1, gate="topk_softmax_locality_penalized").route(*arrays)


def test_the_regularizer_is_a_loss_of_its_own(rng: np.random.Generator) -> None:
    mesh = make_mesh(ep=2)
    x, router = draw(rng, 6, 5), draw(rng, 4, 5)
    arrays = [dist.distribute(a, mesh, REPLICATED) for a in (x, router)]
    mixture = op.moe(num_experts=4, top_k=1)
    op.set_router_regularizer(mixture, kind="topology_distance", weight=0.05)
    loss = mixture.regularizer_loss(*arrays).gather()
    logits = x.astype(np.float64) @ router.T
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    far = np.array([[0, 0, 1, 1]] * 3 + [[1, 1, 0, 0]] * 3)
    assert relative_error(loss, np.array([0.05 * (scores * far).sum() / 6])) < 1e-6
    op.set_router_regularizer(mixture, kind="topology_distance", weight=0)
    with pytest.raises(TesseraError, match="no regularizer"):
        mixture.regularizer_loss(*arrays)
    with pytest.raises(TesseraError, match="euclid"):
        op.set_router_regularizer(mixture, kind="euclid", weight=0.05)


def test_numerics_are_checked() -> None:
    policy = op.numeric(dtype="fp8_e4m3", accum="f32", scale="per_channel", deterministic=True)
    assert (policy.dtype, policy.accum, policy.scale, policy.deterministic) == ("fp8_e4m3", "f32", "per_channel", True)
    for wrong in ({"dtype": "fp5"}, {"dtype": "bf16", "accum": "bf16"}, {"dtype": "f32", "scale": "per_channel"}):
        with pytest.raises(TesseraError) as refused:
            op.numeric(**wrong)  # type: ignore[arg-type]
        assert refused.value.code == "T1505"


def test_stochastic_numerics_as_printed(rng: np.random.Generator) -> None:
    """The policy of the guide rounds without bias, and every run on every mesh alike; test_rounding.py has a million draws."""
    policy = run_snippet(STOCHASTIC_NUMERICS)["POLICY"]
    assert isinstance(policy, op.Numeric) and policy.stochastic_round and policy.deterministic
    x, w = draw(rng, 2000, 16), draw(rng, 12, 16)
    found: list[np.ndarray] = []
    for sizes in ({"tp": 1}, {"tp": 2}, {"tp": 4}):
        mesh = make_mesh(**sizes)
        captured = dist.distribute(w, mesh, shard(col="tp"))
        spec = graph.ArraySpec(x.shape, mesh, dims=("token", "hidden"))
        plan = graph.trace(lambda x, captured=captured: op.linear(policy=policy)(x, captured), spec).compile()
        with rt.open_session(plan) as run:
            found += [run(x).gather(), run(x).gather()]
    assert all(np.array_equal(y, found[0]) for y in found)
    assert relative_error(found[0], x.astype(np.float64) @ w.T) < 0.1


def test_three_dots_are_no_arguments() -> None:
    with pytest.raises(TesseraError, match="three dots"):
        op.moe(...)  # type: ignore[arg-type]


def test_no_public_name_is_that_of_a_vendor() -> None:
    names = " ".join(name for module in (dist, op, graph, rt) for name in module.__all__).lower()
    assert not [word for word in ("nccl", "cuda", "nvlink") if word in names]


def test_the_package_is_the_command_line_too() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tessera", "explain", "T0103"], capture_output=True, text=True, check=True
    )
    assert "T0103" in shown.stdout
    refused = subprocess.run([sys.executable, "-m", "tessera", "plan"], capture_output=True, text=True)
    assert refused.returncode == 2 and "T0031" in refused.stderr


def test_prefetch_as_printed(rng: np.random.Generator) -> None:
    mesh = make_mesh(ep=2)
    mixture = op.moe(num_experts=8, top_k=2, capacity_factor=8.0)
    run_snippet(PREFETCH, MoE=mixture)
    x, router = draw(rng, 6, 5), draw_weight(rng, 8, 5)
    banks = [draw_weight(rng, 8, *shape) for shape in ((7, 5), (7, 5), (5, 7))]
    spread = [dist.distribute(bank, mesh, shard(experts="ep")) for bank in banks]
    whole = dist.distribute(router, mesh, REPLICATED)
    spec = graph.ArraySpec((6, 5), mesh, dims=("token", "hidden"))
    plan = graph.trace(lambda x: mixture(x, whole, *spread), spec).compile()
    # Two experts per token: four of the eight are resident, and a rank has four.
    assert "tier_resident = 4" in plan.text() and "tier_window = 2" in plan.text()
    expected = mix_experts(x, x.astype(np.float64) @ router.T, banks, 2)
    with rt.open_session(plan) as run:
        for _ in range(3):
            assert relative_error(run(x).gather(), expected) < 1e-6
        report = run.prefetch_report()
    assert [layer.stalls for layer in report.layers if layer.call > 1] == [0] * 4
    assert {event.stream for event in report.events} == {"io"}
