"""Experts in two tiers of memory: the bits of a run, the transfers that a routing needs, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers import REPLICATED, Array, draw, make_mesh, shard
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt
from test_processes import wait_until_gone

TOKENS = ("token", "hidden")
EXPERTS = 6
MOST_TOKENS = 5


def make_plan(
    resident: int | None,
    *,
    ep: int = 1,
    layers: int = 1,
    window: int = 1,
    policy: str = "lru_hotness",
    numerics: op.Numeric | None = None,
) -> graph.Plan:
    """Plans layers of experts one after the other, in one tier of memory if ``resident`` is ``None``.

    Token i of a layer uses the expert whose element of the token is largest: routers are identities, and a layer passes its
    tokens on to the router of the next one.
    """
    rng = np.random.default_rng(7)
    mesh = make_mesh(ep=ep)
    router = dist.distribute(np.eye(EXPERTS, dtype=np.float32), mesh, REPLICATED)
    shapes = ((9, EXPERTS), (9, EXPERTS), (EXPERTS, 9))
    banks = [
        [dist.distribute(draw(rng, EXPERTS, *shape), mesh, shard(experts="ep")) for shape in shapes]
        for _ in range(layers)
    ]
    moes = [op.moe(EXPERTS, 1, capacity_factor=float(EXPERTS), policy=numerics) for _ in range(layers)]
    for moe in moes:
        if resident is not None:
            rt.register_prefetch(moe, window=window, policy=policy, resident=resident)

    def stack(x: graph.Value) -> graph.Value:
        y = x
        for moe, bank in zip(moes, banks, strict=True):
            y = y + 0.001 * moe(x, router, *bank)
        return y

    return graph.trace(stack, graph.ArraySpec((MOST_TOKENS, EXPERTS), mesh, dims=TOKENS)).compile()


def route(experts: Sequence[int]) -> Array:
    """Returns tokens that use these experts; the first one is used by the tokens that are left."""
    chosen = [*experts, *[experts[0]] * (MOST_TOKENS - len(experts))]
    return np.eye(EXPERTS, dtype=np.float32)[chosen]


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("resident", [1, 2, EXPERTS])
def test_results_keep_their_bits_whatever_is_resident(rng: np.random.Generator, ep: int, resident: int) -> None:
    tiered, plain = make_plan(resident, ep=ep, layers=2), make_plan(None, ep=ep, layers=2)
    calls = [draw(rng, MOST_TOKENS, EXPERTS) for _ in range(6)]
    with rt.open_session(tiered) as run, rt.open_session(plain) as reference:
        for x in calls:
            assert np.array_equal(run(x).gather(), reference(x).gather())
        report = run.prefetch_report()
        assert (report.stalls > 0) and len(report.layers) == len(calls) * ep * 2
        assert reference.prefetch_report().layers == []


@pytest.mark.parametrize(("ep", "resident"), [(1, 1), (2, 2)])
def test_processes_move_the_experts_that_threads_move(rng: np.random.Generator, ep: int, resident: int) -> None:
    plan, plain = make_plan(resident, ep=ep, layers=2), make_plan(None, ep=ep, layers=2)
    calls = [draw(rng, MOST_TOKENS, EXPERTS) for _ in range(4)]
    with rt.open_session(plain) as reference:
        expected = [reference(x).gather() for x in calls]
    reports = []
    for ranks in ("threads", "processes"):
        with rt.open_session(plan, ranks=ranks, oversubscribe=True) as run:
            assert all(np.array_equal(run(x).gather(), y) for x, y in zip(calls, expected, strict=True))
            reports.append([counts(layer) for layer in run.prefetch_report().layers])
    assert reports[0] == reports[1]


def counts(layer: rt.LayerPrefetch) -> tuple[object, ...]:
    """Returns everything of a layer that the speed of transfers does not change."""
    place = (layer.call, layer.rank, layer.program, layer.layer)
    ahead = (layer.prefetches, layer.prefetches_used, layer.prefetches_unused)
    return (*place, layer.hits, layer.stalls, *ahead, layer.moved_bytes, layer.evicted)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_narrow_experts_keep_their_bits(rng: np.random.Generator, dtype: str) -> None:
    policy = op.numeric(dtype=dtype)
    with (
        rt.open_session(make_plan(2, ep=2, numerics=policy)) as run,
        rt.open_session(make_plan(None, ep=2, numerics=policy)) as plain,
    ):
        for _ in range(3):
            x = draw(rng, MOST_TOKENS, EXPERTS)
            assert np.array_equal(run(x).gather(), plain(x).gather())


# Per call: the expert of all tokens; hits, stalls, experts requested ahead, of which used and not used; evictions since the
# call before.
HOTNESS = [
    (0, (0, 1, 0, 0, 0, [])),
    (0, (1, 0, 0, 0, 0, [])),
    (0, (1, 0, 0, 0, 0, [])),
    (1, (0, 1, 0, 0, 0, [])),
    # 1 was used last, but 0 three times.
    (2, (0, 1, 0, 0, 0, [1])),
    (0, (1, 0, 0, 0, 0, [])),
    (1, (0, 1, 0, 0, 0, [2])),
    # 3 must take a slot, and afterwards 1 gets it back, which was used twice.
    (3, (0, 1, 0, 0, 0, [1])),
    (1, (1, 0, 1, 1, 0, [3])),
    (3, (0, 1, 0, 0, 0, [1])),
    (0, (1, 0, 1, 0, 1, [3])),
]
RECENCY = [
    (0, (0, 1, 0, 0, 0, [])),
    (0, (1, 0, 0, 0, 0, [])),
    (1, (0, 1, 0, 0, 0, [])),
    (2, (0, 1, 0, 0, 0, [0])),
    (0, (0, 1, 0, 0, 0, [1])),
]


@pytest.mark.parametrize(("policy", "script"), [("lru_hotness", HOTNESS), ("lru", RECENCY)])
def test_evictions_follow_the_policy_on_a_scripted_routing(
    policy: str, script: list[tuple[int, tuple[object, ...]]]
) -> None:
    with rt.open_session(make_plan(2, policy=policy)) as run:
        for expert, _ in script:
            run(route([expert]))
        layers = run.prefetch_report().layers
    found = [
        (x.hits, x.stalls, x.prefetches, x.prefetches_used, x.prefetches_unused, x.evicted) for x in layers
    ]
    assert found == [expected for _, expected in script]
    matrices = 4 * 3 * 9 * EXPERTS
    requests = sum(x.stalls + x.prefetches for x in layers)
    assert sum(x.moved_bytes for x in layers) == requests * matrices


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_routing_that_repeats_stalls_only_if_it_does_not_fit(window: int) -> None:
    x = route([0, 2, 5])
    found = {}
    for resident in (2, 3):
        with rt.open_session(make_plan(resident, layers=2, window=window)) as run:
            for _ in range(4):
                run(x)
            layers = run.prefetch_report().layers
        assert [(layer.call, layer.layer) for layer in layers] == [(c, i) for c in range(1, 5) for i in range(2)]
        found[resident] = [layer.stalls for layer in layers]
    assert found[3] == [3, 3, 0, 0, 0, 0, 0, 0]
    assert found[2][:2] == [3, 3] and min(found[2]) > 0


def test_transfers_appear_on_the_stream_io_alone() -> None:
    rt.set_stream_map({"compute": 4, "tp_collective": 3, "a2a": 2, "io": 9})
    plan = make_plan(2, ep=2)
    rt.set_stream_map({"compute": 0, "tp_collective": 1, "a2a": 2, "io": 3})
    with rt.open_session(plan) as run:
        for expert in (0, 1, 2, 3, 4, 5, 0):
            run(route([expert]))
        report = run.prefetch_report()
    assert {(event.stream, event.stream_id) for event in report.events} == {("io", 9)}
    assert all(event.start_ns <= event.end_ns for event in report.events)
    fetched = [event for event in report.events if event.op.startswith("fetch ")]
    # A layer has three matrices of an expert, and each expert lies on one of two ranks.
    assert len(fetched) == 3 * report.stalls
    assert {event.op.split()[3] for event in fetched if event.rank == 1} == {"3", "4", "5"}
    # No event of compute: the plan has no op on io, and its ops are none of the transfers.
    assert "@io" not in plan.text()


def test_a_plan_states_its_tiers_and_counts_the_slots(tmp_path: Path) -> None:
    plain, plans = make_plan(None, ep=2), {resident: make_plan(resident, ep=2) for resident in (1, 2, EXPERTS)}
    expert = 4 * 3 * 9 * EXPERTS
    # A rank has three of the experts, so slots for more stay unused.
    for resident, slots in ((1, 1), (2, 2), (EXPERTS, 3)):
        weights = [memory[0] for memory in plans[resident].memory()]
        assert weights == [memory[0] - (3 - slots) * expert for memory in plain.memory()]
    assert len({plan.digest for plan in [plain, *plans.values()]}) == 4
    assert "tier_resident = 2" in plans[2].text() and plans[2].verify()
    plans[2].save(str(tmp_path / "plan"))

    def check() -> int:
        command = [sys.executable, "-m", "tessera", "check", str(tmp_path / "plan")]
        return subprocess.run(command, capture_output=True).returncode

    assert check() == 0
    program = next((tmp_path / "plan" / "programs").iterdir())
    program.write_text(program.read_text().replace("tier_resident = 2", "tier_resident = 3"))
    assert check() == 1


@pytest.mark.parametrize("ep", [1, 2])
def test_an_estimate_counts_the_experts_that_a_call_waits_for(ep: int) -> None:
    plain, held = make_plan(None, ep=ep, layers=2), EXPERTS // ep
    plans = [make_plan(resident, ep=ep, layers=2) for resident in range(1, EXPERTS + 1)]
    for cluster in ("laptop", "gb200-nvl72"):
        base = plain.estimate(cluster)
        assert (base.fetch_wait_ns, base.fetched_bytes) == (0.0, 0.0) and "wait for experts" not in plain.report(cluster)
        costs = [plan.estimate(cluster) for plan in plans]
        # Every call uses an expert with the same probability, and a layer waits for what its rank does not hold.
        used = 1 - (1 - 1 / EXPERTS) ** MOST_TOKENS
        for resident, cost in enumerate(costs, 1):
            missed = 2 * (held - min(resident, held)) * used
            assert cost.fetched_bytes == pytest.approx(missed * 4 * 3 * 9 * EXPERTS)
            assert cost.ns == pytest.approx(base.ns + cost.fetch_wait_ns)
        times = [cost.fetch_wait_ns for cost in costs]
        assert times == sorted(times, reverse=True) and times[0] > 0.0
        assert all(cost == base for cost in costs[held - 1 :])
        assert f"a rank fetches {costs[0].fetched_bytes:.0f} bytes from host memory" in plans[0].report(cluster)


def test_a_search_of_meshes_shows_the_wait_for_experts() -> None:
    chosen = make_plan(1, ep=2).graphs[0].compile(cluster="laptop", objective="latency", devices=2)
    assert "of experts in host memory" in chosen.explain() and chosen.estimate().fetch_wait_ns > 0.0


def test_a_registration_says_what_it_refuses(rng: np.random.Generator) -> None:
    mesh = make_mesh(ep=2)
    moe = op.moe(4, 2)
    wrong: list[dict[str, object]] = [
        {"policy": "fifo"},
        {"tier_order": ["HBM", "DDR"]},
        {"tier_order": ["Grace", "HBM"]},
        {"tier_order": ["HBM", "HBM"]},
        {"tier_order": ["HBM"]},
        {"stream": "disk"},
        {"stream": "a2a"},
        {"window": 0},
        {"resident": 0},
        {"resident": 5},
    ]
    for arguments in wrong:
        with pytest.raises(TesseraError) as refused:
            rt.register_prefetch(moe, **arguments)  # type: ignore[arg-type]
        assert refused.value.code == "T1509", arguments
        assert all(str(value).strip("[]'\"") in str(refused.value) for value in [*arguments.values()] if isinstance(value, int | str))
    with pytest.raises(TesseraError, match="Layer has no experts"):
        rt.register_prefetch(op.linear())  # type: ignore[arg-type]
    x, router = draw(rng, 3, 5), dist.distribute(draw(rng, 4, 5), mesh, REPLICATED)
    banks = [dist.distribute(draw(rng, 4, 5, 5), mesh, shard(experts="ep")) for _ in range(3)]
    spec = graph.ArraySpec((3, 5), mesh, dims=TOKENS)
    graph.trace(lambda x: moe(x, router, *banks), spec)
    with pytest.raises(TesseraError, match="traced before"):
        rt.register_prefetch(moe)
    late = op.moe(4, 2)
    rt.register_prefetch(late)
    with pytest.raises(TesseraError, match="come with each call"):
        late(dist.distribute(x, mesh, REPLICATED, dims=TOKENS), router, *banks)
    with pytest.raises(TesseraError, match="twice"):
        graph.trace(lambda x: late(late(x, router, *banks), router, *banks), spec)
    # A gate cannot activate partial sums, so its inputs over dp are gathered, and no rank can hold a few of the experts.
    pairs = make_mesh(dp=2)
    gathered = [dist.distribute(draw(rng, 4, 6, 6), pairs, shard(row="dp")) for _ in range(3)]
    whole = dist.distribute(draw(rng, 4, 6), pairs, REPLICATED)
    traced = graph.trace(lambda x: late(x, whole, *gathered), graph.ArraySpec((3, 6), pairs, dims=TOKENS))
    with pytest.raises(TesseraError) as refused:
        traced.compile()
    assert refused.value.code == "T0345"


def test_a_killed_rank_ends_a_run_that_moves_experts() -> None:
    run = rt.open_session(make_plan(1, ep=2), ranks="processes", oversubscribe=True)
    run(route([0, 3, 4]))
    pids = run.process_ids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(TesseraError) as lost:
        for _ in range(100):
            run(route([1, 5, 2]))
    assert lost.value.code.startswith("T07")
    wait_until_gone(pids)
    run.close()
