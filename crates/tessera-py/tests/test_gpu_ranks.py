"""Ranks on one and on two GPUs: snippets of the guide, traces, ranks that join, and streams beside the command line.

Without GPUs they are skipped, unless TESSERA_REQUIRE_GPUS says how many there are.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from helpers import REPLICATED, attend, draw, draw_weight, make_mesh, mix_experts, relative_error, shard
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt
from test_expert_tiers import EXPERTS, MOST_TOKENS, counts, make_plan, route
from test_guide import PREFETCH, ROUTER, STOCHASTIC_NUMERICS, STREAMS, run_snippet
from test_joined import DEADLINE_S, ended, make_host
from test_streams import DEMO, FIRST, collect, run_command
from test_traces import between, events_of, two_branches

GPUS = int(os.environ.get("TESSERA_REQUIRE_GPUS", "0"))
SIZES = [1, 2]


def skip_without(gpus: int) -> None:
    """Skips the test on a machine with fewer GPUs."""
    if GPUS < gpus:
        pytest.skip(f"TESSERA_REQUIRE_GPUS is {GPUS}, and the test needs {gpus} GPUs")


def run_on(device: str, plan: graph.Plan, *inputs: np.ndarray) -> list[np.ndarray]:
    """Calls a plan twice on processes of one kind of device, and on GPUs also on threads of this process."""
    kinds = ["processes", "threads"] if device == "gpu" else ["processes"]
    results = []
    for ranks in kinds:
        with rt.open_session(plan, ranks=ranks, device=device, oversubscribe=device == "cpu") as run:
            results += [run(*inputs).gather() for _ in range(2)]
    assert all(np.array_equal(results[0], result) for result in results)
    return results


@pytest.mark.parametrize("ranks", SIZES)
def test_the_layers_of_the_guide(rng: np.random.Generator, ranks: int) -> None:
    skip_without(ranks)
    run_snippet(STREAMS)
    mesh = make_mesh(tp=1, ep=ranks)
    names = run_snippet(
        ROUTER, arguments={"num_experts": 8, "top_k": 2, "capacity_factor": 8.0}, expert_to_group=[0, 0, 0, 0, 1, 1, 1, 1]
    )
    mixture, linear = names["MoE"], op.linear()
    assert isinstance(mixture, op.Moe)
    attention = op.flash_attention(4, 32, causal=True)
    arrays = [draw_weight(rng, 128, 128) for _ in range(3)] + [draw_weight(rng, 8, 128)]
    banks = [draw_weight(rng, 8, *shape) for shape in ((48, 128), (48, 128), (128, 48))]
    weights = [dist.distribute(a, mesh, REPLICATED) for a in arrays]
    spread = [dist.distribute(bank, mesh, shard(experts="ep")) for bank in banks]

    def block(x: graph.Value) -> graph.Value:
        return mixture(attention(*(linear(x, w) for w in weights[:3])), weights[3], *spread)

    plan = graph.trace(block, graph.ArraySpec((24, 128), mesh, dims=("token", "hidden"))).compile()
    rt.enable_overlap([])
    x = draw(rng, 24, 128)
    q, k, v = (x.astype(np.float64) @ w.T for w in arrays[:3])
    attended = attend(q, k, v, 4, causal=True)
    groups = ranks if ranks > 1 else 1
    home, own = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.arange(24) * groups // 24
    logits = attended @ arrays[3].T - 0.05 * (home[None, :] != own[:, None])
    expected = mix_experts(attended, logits, banks, 2)
    for device in ("gpu", "cpu"):
        assert relative_error(run_on(device, plan, x)[0], expected) < 1e-5, device


@pytest.mark.parametrize("ranks", SIZES)
def test_stochastic_numerics_round_alike_on_every_mesh(rng: np.random.Generator, ranks: int) -> None:
    skip_without(ranks)
    policy = run_snippet(STOCHASTIC_NUMERICS)["POLICY"]
    x, w = draw(rng, 32, 256), draw_weight(rng, 256, 256)

    def plan_for(size: int) -> graph.Plan:
        mesh = make_mesh(tp=size)
        linear = op.linear(policy=policy)  # type: ignore[arg-type]
        whole = dist.distribute(w, mesh, shard(col="tp"))
        return graph.trace(lambda x: linear(x, whole), graph.ArraySpec((32, 256), mesh, dims=("token", "hidden"))).compile()

    found = run_on("gpu", plan_for(ranks), x)[0]
    assert relative_error(found, x.astype(np.float64) @ w.T) < 0.1
    assert np.array_equal(found, run_on("gpu", plan_for(1), x)[0])


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(("resident", "window"), [(1, 1), (2, 1), (2, 2), (EXPERTS, 1)])
def test_experts_in_two_tiers_move_as_on_cpus(rng: np.random.Generator, ranks: int, resident: int, window: int) -> None:
    skip_without(ranks)
    tiered, plain = make_plan(resident, ep=ranks, layers=2, window=window), make_plan(None, ep=ranks, layers=2)
    calls = [draw(rng, MOST_TOKENS, EXPERTS) for _ in range(4)] + [route([e]) for e in (0, 4, 0, 1, 0, 4)] + [route([0, 5])] * 2
    with rt.open_session(plain, ranks="processes", device="gpu") as reference:
        expected = [reference(x).gather() for x in calls]
    with rt.open_session(tiered) as run:
        on_cpus = [run(x).gather() for x in calls]
        moved = [counts(layer) for layer in run.prefetch_report().layers]
    for traces in (False, True):
        with rt.open_session(tiered, ranks="processes", device="gpu", trace=traces) as run:
            for x, y, near in zip(calls, expected, on_cpus, strict=True):
                found = run(x).gather()
                assert np.array_equal(found, y) and relative_error(found, near) < 1e-5
            report = run.prefetch_report()
        assert [counts(layer) for layer in report.layers] == moved
        assert {event.stream for event in report.events} == {"io"}
        assert all(0 <= event.end_ns - event.start_ns < 1e9 for event in report.events)
        prefetched = [event for event in report.events if event.op.startswith("prefetch ")]
        # A layer counts those for its use; the last ones are for a call that does not come.
        used, pending = 3 * sum(layer.prefetches for layer in report.layers), 3 * resident * ranks
        assert used <= len(prefetched) <= used + pending and len(prefetched) % 3 == 0


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_prefetch_of_the_guide(rng: np.random.Generator, ranks: int, dtype: str) -> None:
    skip_without(ranks)
    mesh = make_mesh(ep=ranks)
    router = dist.distribute(draw_weight(rng, 16, 256), mesh, REPLICATED)
    shapes = ((384, 256), (384, 256), (256, 384))
    banks = [[dist.distribute(draw_weight(rng, 16, *shape), mesh, shard(experts="ep")) for shape in shapes] for _ in range(4)]

    def plan_stack(has_tiers: bool) -> graph.Plan:
        moes = [op.moe(16, 2, capacity_factor=8.0, policy=op.numeric(dtype=dtype)) for _ in banks]
        for moe in moes if has_tiers else []:
            run_snippet(PREFETCH, MoE=moe)

        def stack(x: graph.Value) -> graph.Value:
            for moe, bank in zip(moes, banks, strict=True):
                x = x + moe(x, router, *bank)
            return x

        return graph.trace(stack, graph.ArraySpec((24, 256), mesh, dims=("token", "hidden"))).compile()

    tiered, plain = plan_stack(True), plan_stack(False)
    assert [memory[0] for memory in tiered.memory()] < [memory[0] for memory in plain.memory()]
    calls = [draw(rng, 24, 256) for _ in range(4)]
    with rt.open_session(tiered, ranks="processes", device="gpu") as run:
        found = [run(x).gather() for x in calls]
        report = run.prefetch_report()
    assert report.stalls > 0 and sum(layer.prefetches for layer in report.layers) > 0
    for device, bound in (("gpu", 0.0), ("cpu", 1e-5 if dtype == "f32" else 2e-2)):
        with rt.open_session(plain, ranks="processes", device=device, oversubscribe=device == "cpu") as run:
            assert all(relative_error(y, run(x).gather()) <= bound for x, y in zip(calls, found, strict=True)), device


@pytest.mark.parametrize("ranks", SIZES)
def test_a_trace_on_gpus_shows_each_kernel_once(rng: np.random.Generator, ranks: int) -> None:
    skip_without(ranks)
    mesh = make_mesh(tp=ranks)
    up, down = draw_weight(rng, 512, 256), draw_weight(rng, 256, 512)
    wide, narrow = dist.distribute(up, mesh, shard(col="tp")), dist.distribute(down, mesh, shard(row="tp"))
    opened, closed = op.linear(activation="silu"), op.linear()
    spec = graph.ArraySpec((64, 256), mesh, dims=("token", "hidden"))
    plan = graph.trace(lambda x: closed(opened(x, wide), narrow), spec, name="feed_forward").compile()
    x = draw(rng, 64, 256)
    with rt.open_session(plan, ranks="processes", device="gpu", trace=True) as run:
        traced = [run(x).gather() for _ in range(3)]
    trace = run.trace()
    assert np.array_equal(traced[0], run_on("gpu", plan, x)[0])
    assert {(e.rank, e.call) for e in trace.events} == {(r, c) for r in range(ranks) for c in (1, 2, 3)}
    for rank in range(ranks):
        for call in (1, 2, 3):
            events = events_of(trace, rank, call)
            matmuls = [e for e in events if e.op == "matmul"]
            assert len(matmuls) == 2 and all(0 < e.end - e.start < 0.01 for e in matmuls)
            assert matmuls[0].end <= matmuls[1].start
            flights = [e for e in events if e.kind == "in flight"]
            assert len(flights) == (ranks > 1) and all(e.stream == "tp_collective" for e in flights)
            [record] = [c for c in trace.record.calls if c.number == call]
            assert all(record.start <= e.start and e.end <= record.end for e in events)


@pytest.mark.parametrize("pairs", [[], [("tp_collective", "compute")]])
def test_only_a_listed_pair_overlaps_on_two_gpus(pairs: list[tuple[str, str]]) -> None:
    skip_without(2)
    plan = two_branches(pairs)
    rt.enable_overlap([])
    with rt.open_session(plan, ranks="processes", device="gpu", trace=True) as run:
        for _ in range(2):
            run(*(np.ones((6, 8), np.float32) for _ in range(2)))
    for rank in (0, 1):
        events = events_of(run.trace(), rank, 2)
        [issue] = [e for e in events if e.kind == "issue"]
        [flight] = [e for e in events if e.kind == "in flight"]
        computed = [e for e in events if e.kind == "compute"]
        overlapping = [e for e in computed if e.start < flight.end and flight.start < e.end]
        assert pairs or not overlapping, (flight, overlapping)
        assert (issue.op, issue.stream, issue.stream_id) == ("reduce_scatter", "tp_collective", 1)
        assert {e.stream for e in between(events, issue)} <= {"compute"}


def test_two_gpus_that_join_compute_what_processes_compute(rng: np.random.Generator, tmp_path: Path) -> None:
    skip_without(2)
    host, x, expected = make_host(rng, tmp_path, tp=2, ep=1)
    other = host.start(1, device="cuda", local_rank=1)
    with ended([other]):
        with host.open(device="gpu", trace=True) as run:
            found = run(x).gather()
        assert other.wait(DEADLINE_S) == 0, other.stdout and other.stdout.read()
    assert relative_error(found, expected) < 1e-5
    assert np.array_equal(found, run_on("gpu", host.plan, x)[0])
    trace = run.trace()
    [call] = trace.record.calls
    assert {event.rank for event in trace.events} == {0, 1} == set(trace.clock_errors)
    assert all(error <= call.end - call.start for error in trace.clock_errors.values())


@pytest.mark.parametrize("ranks", SIZES)
def test_a_stream_on_gpus_has_the_frames_of_the_command_line(tmp_path: Path, ranks: int) -> None:
    skip_without(ranks)
    mesh = f"tp={ranks}"
    with rt.stream(DEMO, prompt=FIRST, seed=5, chunks=3, mesh=mesh, device="gpu") as stream:
        chunks = collect(stream)
    raw = tmp_path / "frames.rgb"
    options = ["--chunks", "3", "--seed", "5", "--mesh", mesh, "--device", "cuda", "--quiet"]
    run_command("stream", DEMO, "--prompt", FIRST, *options, "--raw", raw, "--out", tmp_path / "run")
    assert np.concatenate(chunks).tobytes() == raw.read_bytes()


def test_joined_gpus_need_gpus(rng: np.random.Generator, tmp_path: Path) -> None:
    if GPUS > 0:
        pytest.skip("this machine has GPUs")
    host, _, _ = make_host(rng, tmp_path)
    with pytest.raises(TesseraError) as refused:
        host.open(device="gpu")
    assert refused.value.code.startswith("T13")
