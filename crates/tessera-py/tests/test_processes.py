"""What happens to rank processes when their Python program is interrupted, killed or loses one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import REPLICATED, draw, make_mesh
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt

PROGRAM = """
import sys
import numpy as np
from tessera import dist, graph, op, runtime as rt

mesh = dist.Mesh(axes=["tp"], shape={"tp": 2})
w = dist.distribute(np.zeros((4096, 4096), np.float32), mesh, dist.ShardSpec(("row",), ("tp",)))
linear = op.linear()
plan = graph.trace(lambda x: linear(x, w), graph.ArraySpec((4096, 4096), mesh, dims=("token", "hidden"))).compile()
with rt.open_session(plan, ranks=sys.argv[1], oversubscribe=True) as run:
    print(*run.process_ids, flush=True)
    x = np.zeros((4096, 4096), np.float32)
    while True:
        run(x)
"""


def start(ranks: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Starts the program in the middle of its calls; returns the process ids of its ranks."""
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, ranks], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = [int(word) for word in program.stdout.readline().split()]
    time.sleep(0.5)
    return program, pids


def wait_until_gone(pids: list[int]) -> None:
    """Waits until no process of the list runs; a process that nobody has waited for is gone, too."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(runs(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"{[pid for pid in pids if runs(pid)]} still run")


def runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_interrupt_ends_a_call(ranks: str) -> None:
    program, pids = start(ranks)
    assert len(pids) == (2 if ranks == "processes" else 0)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=30)
    assert program.returncode != 0 and "KeyboardInterrupt" in errors
    wait_until_gone(pids)


def test_ranks_end_with_a_program_that_is_killed() -> None:
    program, pids = start("processes")
    program.kill()
    program.wait()
    wait_until_gone(pids)


def test_a_killed_rank_ends_the_call_with_its_code(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    w = dist.distribute(draw(rng, 6, 5), mesh, REPLICATED)
    linear = op.linear()
    plan = graph.trace(lambda x: linear(x, w), graph.ArraySpec((4, 5), mesh, dims=("token", "hidden"))).compile()
    run = rt.open_session(plan, ranks="processes", oversubscribe=True)
    run(draw(rng, 4, 5))
    pids = run.process_ids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(TesseraError, match="rank 1") as failed:
        for _ in range(100):
            run(draw(rng, 4, 5))
    assert failed.value.code.startswith("T07")
    with pytest.raises(TesseraError) as ended:
        run(draw(rng, 4, 5))
    assert ended.value.code == "T0092"
    wait_until_gone(pids)


def test_a_signal_handler_may_close_the_session() -> None:
    program = PROGRAM.replace("    while True:", "    import signal\n    signal.signal(signal.SIGTERM, lambda *_: run.close())\n    while True:")
    running = subprocess.Popen([sys.executable, "-c", program, "processes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    pids = [int(word) for word in running.stdout.readline().split()]
    time.sleep(0.5)
    running.terminate()
    _, errors = running.communicate(timeout=30)
    assert "T0092" in errors
    wait_until_gone(pids)


def test_other_threads_run_during_a_call() -> None:
    """A call leaves the interpreter free: a thread counts while it waits."""
    import threading

    mesh = make_mesh(tp=2)
    w = dist.distribute(np.zeros((2048, 2048), np.float32), mesh, REPLICATED)
    linear = op.linear()
    spec = graph.ArraySpec((2048, 2048), mesh, dims=("token", "hidden"))
    plan = graph.trace(lambda x: linear(x, w), spec).compile()
    counted = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal counted
        while not ended.is_set():
            counted += 1
            time.sleep(0.001)

    with rt.open_session(plan) as run:
        thread = threading.Thread(target=count)
        thread.start()
        run(np.zeros((2048, 2048), np.float32))
        ended.set()
        thread.join()
    assert counted > 3


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_session_closes_while_other_threads_call_it(rng: np.random.Generator, ranks: str) -> None:
    import threading

    mesh = make_mesh(tp=2)
    w = dist.distribute(draw(rng, 6, 5), mesh, REPLICATED)
    linear = op.linear()
    plan = graph.trace(lambda x: linear(x, w), graph.ArraySpec((4, 5), mesh, dims=("token", "hidden"))).compile()
    x = draw(rng, 4, 5)
    ends: list[str] = []
    run = rt.open_session(plan, ranks=ranks, oversubscribe=True)

    def call() -> None:
        try:
            while True:
                run(x)
        except RuntimeError as error:
            ends.append(str(error))

    run(x)
    callers = [threading.Thread(target=call, daemon=True) for _ in range(3)]
    for caller in callers:
        caller.start()
    run.close()
    for caller in callers:
        caller.join(30)
    assert ends == ["the session is closed"] * 3
