"""Ranks that join over TCP: rank 0 is started by the session, and the others by ``tessera join``, here all on one machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers import Array, draw, make_mesh, relative_error, shard, silu
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt

TOKENS = ("token", "hidden")
DEADLINE_S = 120


class Host:
    """The files that every rank has, and the address at which they meet."""

    def __init__(self, folder: Path, plan: graph.Plan, function: graph.Graph) -> None:
        self.plan, self.folder = plan, folder
        plan.save(folder / "plan")
        function.save(folder / "function")
        self.secret = folder / "secret"
        self.secret.write_bytes(os.urandom(32))
        self.secret.chmod(0o600)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"

    def start(
        self,
        rank: int,
        *,
        plan: str = "plan",
        secret: Path | None = None,
        join_timeout: int = 100,
        device: str = "cpu",
        local_rank: int = 0,
        clock_shift: int = 0,
    ) -> subprocess.Popen[str]:
        """Starts a rank. The second pair of ranks listens at another address, as on another host.

        The monotonic clock of the rank is ahead by ``clock_shift`` seconds.
        """
        address = "127.0.0.1" if rank < 2 else "127.0.0.2"
        command = [sys.executable, "-m", "tessera", "join", str(self.folder / plan)]
        command += ["--weights", str(self.folder / "function" / "weights.safetensors"), "--rank", str(rank)]
        command += ["--rendezvous", self.rendezvous, "--secret", str(secret or self.secret), "--bind", address]
        command += ["--threads", "1", "--join-timeout", str(join_timeout)]
        command += ["--device", device, "--local-rank", str(local_rank)]
        command = [*shift_clock(clock_shift), *command]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def open(self, *, device: str = "cpu", join_timeout: float = 100.0, trace: bool = False) -> rt.Session:
        return rt.open_session(
            self.plan,
            ranks="joined",
            device=device,
            trace=trace,
            rendezvous=self.rendezvous,
            secret=self.secret,
            join_timeout=join_timeout,
        )


def shift_clock(seconds: int) -> list[str]:
    """Returns the start of a command that runs the rest with another monotonic clock."""
    return ["unshare", "--time", "--monotonic", str(seconds)] if seconds else []


def can_shift_clocks() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*shift_clock(1), "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0


@contextmanager
def ended(ranks: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Leaves no process behind."""
    try:
        yield
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate()


def make_host(
    rng: np.random.Generator, folder: Path, *, tp: int = 2, ep: int = 2
) -> tuple[Host, Array, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    mesh = make_mesh(tp=tp, ep=ep)
    x, up, down = draw(rng, 6, 10), draw(rng, 9, 10), draw(rng, 10, 9)
    wide, narrow = dist.distribute(up, mesh, shard(col="tp")), dist.distribute(down, mesh, shard(row="tp"))
    opened, closed = op.linear(activation="silu"), op.linear()
    spec = graph.ArraySpec((6, 10), mesh, shard(token="ep"), dims=TOKENS)
    function = graph.trace(lambda x: closed(opened(x, wide), narrow), spec, name="feed_forward")
    return Host(folder, function.compile(), function), x, silu(x.astype(np.float64) @ up.T) @ down.T


def test_two_and_two_ranks_compute_what_threads_compute(rng: np.random.Generator, tmp_path: Path) -> None:
    host, x, expected = make_host(rng, tmp_path)
    others = [host.start(rank) for rank in (1, 2, 3)]
    with ended(others):
        with host.open() as run:
            assert len(run.process_ids) == 1
            results = [run(np.float32(scale) * x).gather() for scale in (1, 2)]
            with pytest.raises(TesseraError) as refused:
                run(x[:3])
            assert refused.value.code == "T0091"
            again = run(x).gather()
        assert [rank.wait(DEADLINE_S) for rank in others] == [0, 0, 0], [rank.stdout and rank.stdout.read() for rank in others]
    assert relative_error(results[0], expected) < 1e-6
    assert np.array_equal(again, results[0])
    with rt.open_session(host.plan) as run:
        assert [np.array_equal(run(np.float32(scale) * x).gather(), found) for scale, found in zip((1, 2), results, strict=True)] == [True, True]


@pytest.mark.parametrize("shift", [0, 5000])
def test_a_trace_places_the_clocks_of_all_ranks_on_one(rng: np.random.Generator, tmp_path: Path, shift: int) -> None:
    if shift and not can_shift_clocks():
        pytest.skip("this host does not let a process have a clock of its own")
    host, x, expected = make_host(rng, tmp_path)
    others = [host.start(rank, clock_shift=shift if rank > 1 else 0) for rank in (1, 2, 3)]
    with ended(others):
        with host.open(trace=True) as run:
            assert all(relative_error(run(x).gather(), expected) < 1e-6 for _ in range(5))
        assert [rank.wait(DEADLINE_S) for rank in others] == [0, 0, 0], [rank.stdout and rank.stdout.read() for rank in others]
    trace = run.trace()
    assert trace.record.place == "joined" and len(trace.record.calls) == 5
    longest = max(call.end - call.start for call in trace.record.calls)
    assert trace.clock_errors[0] == 0 and set(trace.clock_errors) == {0, 1, 2, 3}
    assert all(0 <= error <= longest for error in trace.clock_errors.values())
    resolution = 2e-9
    for call in trace.record.calls:
        events = [event for event in trace.events if event.call == call.number]
        assert {event.rank for event in events} == {0, 1, 2, 3}
        assert all(call.start - resolution <= event.start and event.end <= call.end + resolution for event in events)
        for group in ((0, 1), (2, 3)):
            sums = [event for event in events if event.rank in group and event.op == "all_reduce"]
            issues = [event.start for event in sums if event.kind == "issue"]
            assert len(issues) == 2
            assert all(event.end + resolution >= max(issues) for event in sums if event.kind == "in flight")


def test_a_rank_with_another_plan_is_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    host, _, _ = make_host(rng, tmp_path)
    other = graph.load(tmp_path / "function").compile(mesh=make_mesh(tp=4, ep=1))
    other.save(tmp_path / "other")
    others = [host.start(1), host.start(2, plan="other"), host.start(3)]
    with ended(others):
        with pytest.raises(TesseraError) as refused:
            host.open()
        assert refused.value.code in {"T0740", "T0757"}
        assert "plan digest" in str(refused.value)
        assert all(rank.wait(DEADLINE_S) not in (0, None) for rank in others)


def test_a_rank_with_another_secret_stays_outside(rng: np.random.Generator, tmp_path: Path) -> None:
    host, _, _ = make_host(rng, tmp_path)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(os.urandom(32))
    wrong.chmod(0o600)
    others = [host.start(1), host.start(2, secret=wrong, join_timeout=8), host.start(3)]
    with ended(others):
        with pytest.raises(TesseraError) as alone:
            host.open(join_timeout=8.0)
        assert alone.value.code == "T0758" and "2" in str(alone.value)
        text, _ = others[1].communicate(timeout=DEADLINE_S)
        assert "T0756" in text or "T0758" in text
        assert others[1].returncode != 0


def test_a_lost_rank_ends_the_session_with_its_code(rng: np.random.Generator, tmp_path: Path) -> None:
    host, x, _ = make_host(rng, tmp_path)
    others = [host.start(rank) for rank in (1, 2, 3)]
    with ended(others):
        run = host.open()
        run(x)
        others[1].kill()
        others[1].wait(DEADLINE_S)
        with pytest.raises(TesseraError) as lost:
            for _ in range(10_000):
                run(x)
        assert lost.value.code.startswith("T07") and "2" in f"{lost.value} {lost.value.notes}"
        with pytest.raises(TesseraError) as over:
            run(x)
        assert over.value.code == "T0092"
        run.close()
        assert all(rank.wait(DEADLINE_S) != 0 for rank in others)


def test_settings_of_a_rendezvous_are_checked(rng: np.random.Generator, tmp_path: Path) -> None:
    host, _, _ = make_host(rng, tmp_path)
    with pytest.raises(ValueError, match="secret"):
        rt.open_session(host.plan, ranks="joined", rendezvous=host.rendezvous)
    with pytest.raises(ValueError, match="host and the port"):
        rt.open_session(host.plan, ranks="joined", rendezvous="here", secret=host.secret)
    with pytest.raises(ValueError, match="joined"):
        rt.open_session(host.plan, secret=host.secret)
    host.secret.chmod(0o644)
    with pytest.raises(TesseraError) as public:
        host.open()
    assert public.value.code == "T0035"
    for beyond in (host.start(9), host.start(1, local_rank=2)):
        with ended([beyond]):
            text, _ = beyond.communicate(timeout=DEADLINE_S)
            assert beyond.returncode != 0 and "T0034" in text


def test_an_interrupt_ends_the_wait_for_others(rng: np.random.Generator, tmp_path: Path) -> None:
    host, _, _ = make_host(rng, tmp_path)
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        host.open()
    timer.join()
