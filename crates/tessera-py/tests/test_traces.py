"""Traces and records of sessions: what each rank ran, in which order, and on which stream."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import draw, make_mesh, shard
from tessera import dist, graph, op
from tessera import runtime as rt

TOKENS = ("token", "hidden")
RANKS = ["threads", "processes"]
Pairs = list[tuple[str, str]]


def run_traced(plan: graph.Plan, ranks: str, calls: int = 2, out: str | None = None) -> rt.SessionTrace:
    """Calls a plan with inputs of ones and returns the trace."""
    with rt.open_session(plan, ranks=ranks, oversubscribe=True, trace=True, out=out) as run:
        inputs = [np.ones((6, 8), np.float32) for _ in plan.graphs[0].inputs]
        for _ in range(calls):
            run(*inputs)
    return run.trace()


def events_of(trace: rt.SessionTrace, rank: int, call: int) -> list[rt.TraceEvent]:
    """Returns the events of one rank in one call, in order."""
    return [event for event in trace.events if (event.rank, event.call) == (rank, call)]


def between(events: list[rt.TraceEvent], issue: rt.TraceEvent) -> list[rt.TraceEvent]:
    """Returns what a rank did between the issue of a collective and the wait for it."""
    begin = events.index(issue)
    ends = [i for i, e in enumerate(events) if e.kind == "wait" and e.issued_by == issue.issued_by]
    assert len(ends) == 1
    inside = events[begin + 1 : ends[0]]
    return [event for event in inside if event.issued_by != issue.issued_by]


def two_branches(pairs: Pairs) -> graph.Plan:
    """A row-parallel layer, whose sum travels, beside two ops that do not need it."""
    mesh = make_mesh(tp=2)
    w = dist.distribute(np.ones((8, 8), np.float32), mesh, shard(row="tp"))
    linear, act = op.linear(), op.silu()
    spec = graph.ArraySpec((6, 8), mesh, dims=TOKENS)
    rt.enable_overlap(pairs)
    by_hidden = graph.ArraySpec((6, 8), mesh, shard(hidden="tp"), dims=TOKENS)
    return graph.trace(lambda x, y: linear(x, w) + act(act(y)), by_hidden, spec, name="branches").compile()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("pairs", [[], [("tp_collective", "compute")]])
def test_only_a_listed_pair_computes_while_a_collective_is_in_flight(ranks: str, pairs: Pairs) -> None:
    trace = run_traced(two_branches(pairs), ranks)
    assert {(event.rank, event.call) for event in trace.events} == {(0, 1), (0, 2), (1, 1), (1, 2)}
    for rank in (0, 1):
        for call in (1, 2):
            events = events_of(trace, rank, call)
            issues = [event for event in events if event.kind == "issue"]
            assert [(event.op, event.stream) for event in issues] == [("reduce_scatter", "tp_collective")]
            inside = between(events, issues[0])
            assert all(event.kind == "compute" and event.stream == "compute" for event in inside)
            assert [event.op for event in inside] == (["silu", "silu"] if pairs else [])
            [in_flight] = [event for event in events if event.kind == "in flight"]
            # The order of the list is that of the clock.
            assert all(in_flight.start <= e.start and e.end <= in_flight.end for e in inside)
            others = [e for e in events if e.kind == "compute" and e not in inside]
            assert all(e.end <= in_flight.start or e.start >= in_flight.end for e in others)


def two_collectives(pairs: Pairs) -> graph.Plan:
    """A sum over tp beside one over ep, neither of which needs the other."""
    mesh = make_mesh(tp=2, ep=2)
    over_tp, over_ep = (
        dist.distribute(np.ones((8, 8), np.float32), mesh, shard(row=axis)) for axis in ("tp", "ep")
    )
    linear = op.linear()
    spec = graph.ArraySpec((6, 8), mesh, dims=TOKENS)
    rt.enable_overlap(pairs)
    return graph.trace(lambda x, y: linear(x, over_tp) + linear(y, over_ep), spec, spec, name="sums").compile()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("with_pair", [False, True])
def test_two_collective_streams_overlap_only_if_their_pair_is_listed(ranks: str, with_pair: bool) -> None:
    both: Pairs = [("tp_collective", "compute"), ("a2a", "compute")]
    trace = run_traced(two_collectives(both + [("a2a", "tp_collective")] * with_pair), ranks, calls=1)
    for rank in range(4):
        events = events_of(trace, rank, 1)
        first, second = (event for event in events if event.kind == "issue")
        assert {first.stream, second.stream} == {"tp_collective", "a2a"}
        inside = between(events, first)
        assert ("compute", "matmul") in [(event.kind, event.op) for event in inside]
        # Without the pair the first collective is complete before the second one is issued.
        assert (second in inside) == with_pair
        flights = [event for event in events if event.kind == "in flight"]
        assert (flights[1].start < flights[0].end) == with_pair


def test_stream_ids_are_those_of_the_map(tmp_path: Path) -> None:
    defaults = two_branches([]).stream_ids
    assert defaults == {"compute": 0, "tp_collective": 1, "a2a": 2, "io": 3, "pp": 4}
    rt.set_stream_map({"compute": 5, "tp_collective": 0, "a2a": 11, "io": 2})
    plan = two_branches([("tp_collective", "compute")])
    rt.set_stream_map({"compute": 0, "tp_collective": 1, "a2a": 2, "io": 3})
    trace = run_traced(plan, "threads")
    assert {(event.stream, event.stream_id) for event in trace.events} == {("compute", 5), ("tp_collective", 0)}
    assert trace.stream_ids == {"compute": 5, "tp_collective": 0, "a2a": 11, "io": 2, "pp": 1}
    trace.save(tmp_path / "trace.json")
    saved = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {(e["pid"], e["tid"], e["args"]["name"]) for e in saved if e["name"] == "thread_name"}
    streams = ((5, "compute (stream 5)"), (0, "tp_collective (stream 0)"))
    assert named == {(pid, *stream) for pid in (1, 2) for stream in streams}
    slices = [e for e in saved if e["ph"] == "X"]
    assert len(slices) == len(trace.events)
    shown = {(e["tid"], e["name"]) for e in slices}
    assert {(5, "silu"), (0, "reduce_scatter issue"), (0, "reduce_scatter in flight"), (5, "reduce_scatter wait")} <= shown


def test_a_run_of_processes_leaves_its_trace_in_its_folder(tmp_path: Path) -> None:
    plan = two_branches([])
    trace = run_traced(plan, "processes", out=str(tmp_path / "run"))
    trace.save(tmp_path / "saved.json")
    assert (tmp_path / "run" / "trace.json").read_text() == (tmp_path / "saved.json").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "record.jsonl").read_text().splitlines()]
    assert [line["chunk"] for line in lines if line["kind"] == "chunk"] == [0, 1]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_record_has_each_call(rng: np.random.Generator, ranks: str) -> None:
    mesh = make_mesh(tp=2)
    w = dist.distribute(draw(rng, 8, 8), mesh, shard(row="tp"))
    linear, act = op.linear(), op.silu()
    spec = graph.ArraySpec((6, 8), mesh, dims=TOKENS)
    plan = graph.compile(
        graph.trace(lambda x: linear(x, w), spec, name="project"), graph.trace(lambda x: act(x), spec, name="act")
    )
    x = draw(rng, 6, 8)
    with rt.open_session(plan, ranks=ranks, oversubscribe=True) as run:
        for program in ("act", "project", "act"):
            run.run(program, x)
        with pytest.raises(RuntimeError, match="trace=True"):
            run.trace()
    record = run.record()
    assert (record.plan_digest, record.mesh, record.ranks) == (plan.digest, "tp=2", 2)
    assert (record.place, record.device, record.call_count) == (ranks, "cpu", 3)
    assert [(call.number, call.program) for call in record.calls] == [(1, "act"), (2, "project"), (3, "act")]
    assert all(call.end - call.start == call.seconds for call in record.calls)
    assert all(a.end <= b.start for a, b in zip(record.calls, record.calls[1:], strict=False))


def test_events_lie_within_their_calls_and_name_the_ops_of_the_plan() -> None:
    plan = two_branches([("tp_collective", "compute")])
    trace = run_traced(plan, "processes")
    assert [event.start for event in trace.events] == sorted(event.start for event in trace.events)
    calls = {call.number: call for call in trace.record.calls}
    for event in trace.events:
        call = calls[event.call]
        assert event.program == call.program == "branches"
        assert call.start <= event.start <= event.end <= call.end
    kinds = [(event.kind, event.op) for event in events_of(trace, 0, 1)]
    assert kinds == [
        ("compute", "matmul"),
        ("issue", "reduce_scatter"),
        ("in flight", "reduce_scatter"),
        ("compute", "silu"),
        ("compute", "silu"),
        ("wait", "reduce_scatter"),
        ("compute", "take_shard"),
        ("compute", "add"),
        ("compute", "output"),
    ]


def test_ranks_on_gpus_are_not_traced() -> None:
    with pytest.raises(Exception, match="GPU"):
        rt.open_session(two_branches([]), ranks="processes", device="gpu", trace=True, oversubscribe=True)
