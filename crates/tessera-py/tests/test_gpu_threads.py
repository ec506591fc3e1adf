"""Ranks on several GPUs that are threads of this process: their results, what they take and return, and that no wait is without end.

Without GPUs they are skipped, unless TESSERA_REQUIRE_GPUS says how many there are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import REPLICATED, Array, draw, draw_weight, make_mesh, relative_error, shard
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt
from test_expert_tiers import EXPERTS, MOST_TOKENS, counts, make_plan, route
from test_gpu import import_torch
from test_random import PROGRAMS_PER_PLAN, RandomProgram
from test_traces import events_of, two_branches

GPUS = int(os.environ.get("TESSERA_REQUIRE_GPUS", "0"))

pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"TESSERA_REQUIRE_GPUS is {GPUS}, and the tests need 2 GPUs")

# The longest time that a test waits for a thread.
DEADLINE_S = 60.0


def open_threads(plan: graph.Plan, *, trace: bool = False) -> rt.Session:
    return rt.open_session(plan, ranks="threads", device="gpu", trace=trace)


def plan_feed_forward(rng: np.random.Generator, tokens: int = 64, spec: dist.ShardSpec | None = None) -> graph.Plan:
    """Plans a layer whose ranks add their terms in an all-reduce."""
    mesh = make_mesh(tp=2)
    wide = dist.distribute(draw_weight(rng, 512, 256), mesh, shard(col="tp"))
    narrow = dist.distribute(draw_weight(rng, 256, 512), mesh, shard(row="tp"))
    opened, closed = op.linear(activation="silu"), op.linear()
    of_input = graph.ArraySpec((tokens, 256), mesh, spec, dims=("token", "hidden"))
    return graph.trace(lambda x: closed(opened(x, wide), narrow), of_input).compile()


def run_all(tasks: list[Callable[[], None]]) -> None:
    """Runs tasks on threads, fails if one does not end, and raises the first error."""
    failures: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if failures:
        raise failures[0]


def test_threads_have_the_bits_of_processes_call_after_call(rng: np.random.Generator) -> None:
    plan = plan_feed_forward(rng)
    calls = [draw(rng, 64, 256) for _ in range(5)]
    with rt.open_session(plan, ranks="processes", device="gpu") as run:
        expected = [run(x).gather() for x in calls]
    with open_threads(plan) as run:
        assert run.process_ids == []
        for _ in range(100):
            assert all(np.array_equal(run(x).gather(), y) for x, y in zip(calls, expected, strict=True))


@pytest.mark.parametrize("axis", ["tp", "ep", "dp"])
def test_random_programs_equal_numpy(axis: str) -> None:
    rng = np.random.default_rng(["tp", "ep", "dp"].index(axis))
    mesh, one_rank = make_mesh(**{axis: 2}), make_mesh(tp=1)
    programs = [RandomProgram(rng, mesh, one_rank, f"p{i}") for i in range(PROGRAMS_PER_PLAN)]
    plan = graph.compile(*(program.trace(False) for program in programs))
    with open_threads(plan) as run:
        for program in programs * 2:
            error = relative_error(run.run(program.name, program.x).gather(), program.exact[-1])
            assert error < 2e-5, f"{program.name}: {error}\n{program.trace(False).text()}"


def test_tensors_come_and_stay_on_the_gpus_of_their_ranks(rng: np.random.Generator) -> None:
    torch = import_torch()
    mesh = make_mesh(tp=2)
    weight = draw_weight(rng, 96, 64)
    by_column = dist.distribute(weight, mesh, shard(col="tp"))
    layer = op.linear(activation="silu")
    plan = graph.trace(lambda x: layer(x, by_column), graph.ArraySpec((48, 64), mesh, dims=("token", "hidden"))).compile()
    x = draw(rng, 48, 64)
    source = torch.from_numpy(x).cuda(0)
    with open_threads(plan) as run:
        y = run(dist.distribute(source, mesh, REPLICATED))
        assert y.device == "gpu" and [y.local(rank).device for rank in range(2)] == ["gpu:0", "gpu:1"]
        parts = [torch.from_dlpack(y.local(rank)) for rank in range(2)]
        assert [part.device.index for part in parts] == [0, 1] and [tuple(part.shape) for part in parts] == [(48, 48)] * 2
        assert np.array_equal(run(x).gather(), y.gather())
        with pytest.raises(TesseraError) as refused:
            run(source)
        assert refused.value.code == "T0099" and "GPU 1" in str(refused.value)
        assert np.array_equal(run(x).gather(), y.gather()), "a refused call ends nothing"
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert relative_error(y.gather(), exact / (1 + np.exp(-exact))) < 1e-5
    assert np.array_equal(np.concatenate([part.cpu().numpy() for part in parts], axis=1), y.gather())


@pytest.mark.parametrize("dim", ["token", "hidden"])
def test_a_rank_reads_its_shard_from_a_shard_or_from_the_whole_array(rng: np.random.Generator, dim: str) -> None:
    torch = import_torch()
    mesh, spec = make_mesh(tp=2), shard(**{dim: "tp"})
    silu = op.silu()
    plan = graph.trace(lambda x: silu(x), graph.ArraySpec((37, 64), mesh, spec, dims=("token", "hidden"))).compile()
    x = draw(rng, 37, 64)
    source = torch.from_numpy(x).cuda(0)
    by_name = {"token": "col", "hidden": "row"}[dim]
    with open_threads(plan) as run:
        expected = run(x).gather()
        for layout in (shard(**{by_name: "tp"}), REPLICATED):
            y = run(dist.distribute(source, mesh, layout))
            assert y.sharding == {dim: "tp"} and np.array_equal(y.gather(), expected)
        # The output of a call is the input of the next one, shard by shard.
        assert np.array_equal(run(y).gather(), run(expected).gather())
    assert relative_error(expected, x / (1 + np.exp(-x.astype(np.float64)))) < 1e-6


def test_memory_that_other_threads_allocate_and_free_stops_no_call(rng: np.random.Generator) -> None:
    torch = import_torch()
    plan = plan_feed_forward(rng)
    x = draw(rng, 64, 256)
    mesh = make_mesh(tp=2)
    source = torch.from_numpy(draw(rng, 1024, 256)).cuda(0)
    is_over = threading.Event()

    def allocate() -> None:
        while not is_over.is_set():
            array = dist.distribute(source, mesh, shard(row="tp"))
            assert array.shape == (1024, 256)
            del array

    def call() -> None:
        try:
            with open_threads(plan) as run:
                expected = run(x).gather()
                for _ in range(300):
                    assert np.array_equal(run(x).gather(), expected)
        finally:
            is_over.set()

    run_all([call, allocate, allocate])


def test_sessions_of_the_same_gpus_exclude_each_other(rng: np.random.Generator) -> None:
    plans = [plan_feed_forward(rng, tokens) for tokens in (8, 512)]

    def use(plan: graph.Plan, tokens: int) -> None:
        x = np.ones((tokens, 256), np.float32)
        for _ in range(3):
            with open_threads(plan) as run:
                expected = run(x).gather()
                assert all(np.array_equal(run(x).gather(), expected) for _ in range(30))

    run_all([lambda: use(plans[0], 8), lambda: use(plans[1], 512), lambda: use(plans[0], 8)])


def test_a_failure_of_one_rank_ends_all(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    silu = op.silu()
    spec = graph.ArraySpec((64, 32), mesh, shard(token="tp"), dims=("token", "hidden"))
    plan = graph.trace(lambda x: silu(x), spec).compile()
    x = draw(rng, 64, 32)
    wrong = x.copy()
    wrong[40, 3] = np.nan
    for _ in range(3):
        with open_threads(plan) as run:
            run(x)
            with pytest.raises(TesseraError) as found:
                run(wrong)
            assert found.value.code == "T0771" and "rank 1" in str(found.value)
            with pytest.raises(TesseraError) as ended:
                run(x)
            assert ended.value.code == "T0092"


def test_ranks_that_fail_free_their_memory(rng: np.random.Generator) -> None:
    torch = import_torch()
    mesh, width = make_mesh(tp=2), 8192
    weight = rng.random((width, width), dtype=np.float32)
    by_row = dist.distribute(weight, mesh, shard(row="tp"))
    linear = op.linear()
    plan = graph.trace(lambda x: linear(x, by_row), graph.ArraySpec((16, width), mesh, dims=("token", "hidden"))).compile()
    x = np.zeros((16, width), np.float32)
    wrong = np.full_like(x, np.nan)

    def used() -> list[int]:
        return [total - free for free, total in (torch.cuda.mem_get_info(gpu) for gpu in range(2))]

    with open_threads(plan) as run:
        run(x)
    before = used()
    for fails in (False, True):
        with open_threads(plan) as run:
            run(x)
            loaded = used()
            assert all(now - then >= weight.nbytes // 2 for now, then in zip(loaded, before, strict=True))
            if fails:
                with pytest.raises(TesseraError) as found:
                    run(wrong)
                assert found.value.code == "T0771"
        # The threads of ranks that fail free the memory of these on their own.
        deadline = time.monotonic() + DEADLINE_S
        while any(now - then > weight.nbytes // 8 for now, then in zip(used(), before, strict=True)):
            assert time.monotonic() < deadline, (before, loaded, used())
            time.sleep(0.05)


INTERRUPTED = """
import numpy as np
from tessera import dist, graph, op, runtime as rt

mesh = dist.Mesh(axes=["tp"], shape={"tp": 2})
w = dist.distribute(np.zeros((4096, 4096), np.float32), mesh, dist.ShardSpec(("row",), ("tp",)))
linear = op.linear()
plan = graph.trace(lambda x: linear(x, w), graph.ArraySpec((4096, 4096), mesh, dims=("token", "hidden"))).compile()
x = np.zeros((4096, 4096), np.float32)
for _ in range(2):
    try:
        with rt.open_session(plan, ranks="threads", device="gpu") as run:
            while True:
                run(x)
                print("called", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_an_interrupt_ends_a_call_and_another_session_runs() -> None:
    program = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert program.stdout is not None
    for _ in range(2):
        lines = iter(program.stdout.readline, "")
        assert any(line == "called\n" for line in lines)
        program.send_signal(signal.SIGINT)
        assert any(line == "interrupted\n" for line in lines)
    assert program.wait(DEADLINE_S) == 0


def test_a_rank_that_cannot_load_ends_the_load_of_all(rng: np.random.Generator) -> None:
    torch = import_torch()
    free, total = torch.cuda.mem_get_info(1)
    mesh, width = make_mesh(tp=2), 16384
    weight = np.ones((width, width), np.float32)
    by_row = dist.distribute(weight, mesh, shard(row="tp"))
    linear = op.linear()
    plan = graph.trace(lambda x: linear(x, by_row), graph.ArraySpec((16, width), mesh, dims=("token", "hidden"))).compile()
    taken = torch.empty(free - (256 << 20), dtype=torch.uint8, device="cuda:1")
    with pytest.raises(TesseraError) as refused:
        open_threads(plan)
    assert "rank 1" in str(refused.value) and "allocate" in str(refused.value), (free, total)
    del taken
    torch.cuda.empty_cache()
    with open_threads(plan) as run:
        assert np.array_equal(run(np.ones((16, width), np.float32)).gather(), np.full((16, width), width, np.float32))


def test_a_session_that_closes_during_calls_ends_them(rng: np.random.Generator) -> None:
    plan = plan_feed_forward(rng)
    x = draw(rng, 64, 256)
    with open_threads(plan) as run:
        run(x)
        begun = threading.Event()

        def call() -> None:
            try:
                for _ in range(2000):
                    run(x)
                    begun.set()
                raise AssertionError("the session was never closed")
            except RuntimeError as error:
                assert "closed" in str(error)

        def close() -> None:
            begun.wait(DEADLINE_S)
            run.close()

        run_all([call, call, close])
    with open_threads(plan) as run:
        run(x)


@pytest.mark.parametrize("pairs", [[], [("tp_collective", "compute")]])
def test_a_trace_of_threads_shows_only_listed_overlap(pairs: list[tuple[str, str]]) -> None:
    plan = two_branches(pairs)
    rt.enable_overlap([])
    with open_threads(plan, trace=True) as run:
        found = [run(*(np.ones((6, 8), np.float32) for _ in range(2))).gather() for _ in range(3)]
    assert all(np.array_equal(found[0], y) for y in found)
    for rank in (0, 1):
        events = events_of(run.trace(), rank, 3)
        [flight] = [e for e in events if e.kind == "in flight"]
        computed = [e for e in events if e.kind == "compute"]
        overlapping = [e for e in computed if e.start < flight.end and flight.start < e.end]
        assert computed and (pairs or not overlapping), (flight, overlapping)


@pytest.mark.parametrize(("resident", "window"), [(1, 1), (2, 2), (EXPERTS, 1)])
def test_experts_in_two_tiers_move_as_on_cpus(rng: np.random.Generator, resident: int, window: int) -> None:
    tiered = make_plan(resident, ep=2, layers=2, window=window)
    calls: list[Array] = [draw(rng, MOST_TOKENS, EXPERTS) for _ in range(4)] + [route([e]) for e in (0, 4, 0, 1)]
    reports: list[list[Any]] = []
    for device in ("cpu", "gpu"):
        with rt.open_session(tiered, ranks="threads", device=device) as run:
            found = [run(x).gather() for x in calls]
            reports.append([counts(layer) for layer in run.prefetch_report().layers])
    assert reports[0] == reports[1]
    with open_threads(make_plan(None, ep=2, layers=2)) as run:
        assert all(np.array_equal(run(x).gather(), y) for x, y in zip(calls, found, strict=True))
