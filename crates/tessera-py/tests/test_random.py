"""Random programs: on one rank as threads and on several as processes they equal numpy.

TESSERA_RANDOM_PROGRAMS=1000 draws a thousand.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from helpers import Array, draw, make_mesh, relative_error, silu, softmax
from numpy.typing import NDArray
from tessera import dist, graph, op
from tessera import runtime as rt

PROGRAMS = int(os.environ.get("TESSERA_RANDOM_PROGRAMS", "200"))
PROGRAMS_PER_PLAN = 50
MESHES = [{"tp": 2}, {"tp": 3}, {"ep": 2}, {"tp": 2, "ep": 2}, {"dp": 2}]

Exact = NDArray[np.float64]
Step = Callable[[list[graph.Value]], graph.Value]


class RandomProgram:
    """A random function of one input, with the numpy function that defines it."""

    def __init__(self, rng: np.random.Generator, mesh: dist.Mesh, one_rank: dist.Mesh, name: str) -> None:
        self.rng = rng
        self.meshes = (mesh, one_rank)
        self.name = name
        rows, width = (int(n) for n in rng.integers(3, 13, 2))
        self.x = draw(rng, rows, width)
        self.exact: list[Exact] = [self.x.astype(np.float64)]
        self.steps: list[tuple[Step, Step]] = []
        for _ in range(rng.integers(2, 8)):
            self.add_step()
        self.specs = [
            graph.ArraySpec(self.x.shape, m, self.draw_spec(m, self.x.shape, ("token", "hidden")), dims=("token", "hidden"))
            for m in self.meshes
        ]

    def trace(self, on_one_rank: bool) -> graph.Graph:
        """Traces the function for one of the two meshes."""

        def function(x: graph.Value) -> graph.Value:
            values = [x]
            for steps in self.steps:
                values.append(steps[on_one_rank](values))
            return values[-1]

        return graph.trace(function, self.specs[on_one_rank], name=self.name)

    def add_step(self) -> None:
        """Adds an op whose operands are drawn from what exists."""
        at = int(self.rng.integers(len(self.exact)))
        x = self.exact[at]
        width = x.shape[1]
        like = [i for i, other in enumerate(self.exact) if other.shape == x.shape]
        other = int(self.rng.choice(like))
        kind = self.rng.choice(["linear", "linear_bias", "add", "mul", "silu", "relu", "rms", "norm", "softmax", "shift"])
        if kind in ("linear", "linear_bias"):
            w = draw(self.rng, int(self.rng.integers(3, 13)), width) / np.float32(np.sqrt(width))
            arrays = [w] + ([draw(self.rng, len(w))] if kind == "linear_bias" else [])
            self.push(op.linear(), [at], arrays, x @ w.T + (arrays[1] if len(arrays) > 1 else 0))
        elif kind == "add":
            self.push_step(lambda v: v[at] + v[other], x + self.exact[other])
        elif kind == "mul":
            self.push_step(lambda v: v[at] * v[other], x * self.exact[other])
        elif kind == "silu":
            self.push(op.silu(), [at], [], silu(x))
        elif kind == "relu":
            self.push(op.relu(), [at], [], np.maximum(x, 0))
        elif kind == "softmax":
            self.push(op.softmax(), [at], [], softmax(x))
        elif kind == "shift":
            shift = draw(self.rng, 1, width)
            self.push_step(lambda v: v[at] - shift, x - shift)
        elif kind == "rms":
            w = draw(self.rng, width)
            root = np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-3)
            self.push(op.rms_norm(1e-3), [at], [w], x / root * w)
        else:
            w, b = draw(self.rng, width), draw(self.rng, width)
            centred = x - x.mean(axis=1, keepdims=True)
            scale = np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-3)
            self.push(op.layer_norm(1e-3), [at], [w, b], centred / scale * w + b)

    def push(self, layer: op.Layer, operands: list[int], arrays: list[Array], exact: Exact) -> None:
        """Adds a layer with weights, which have a layout of their own on each mesh."""

        def make(mesh: dist.Mesh) -> Step:
            weights = [dist.distribute(a.copy(), mesh, self.draw_spec(mesh, a.shape, None)) for a in arrays]
            return lambda values: layer(*(values[i] for i in operands), *weights)

        self.steps.append((make(self.meshes[0]), make(self.meshes[1])))
        self.exact.append(exact)

    def push_step(self, step: Step, exact: Exact) -> None:
        self.steps.append((step, step))
        self.exact.append(exact)

    def draw_spec(
        self, mesh: dist.Mesh, shape: tuple[int, ...], dims: tuple[str, ...] | None
    ) -> dist.ReplicateSpec | dist.ShardSpec:
        """Draws which axes of the mesh shard which dims that are large enough."""
        names = list(dims or ("col", "row")[: len(shape)])
        extents = dict(zip(names, shape, strict=True))
        pairs: list[tuple[str, str]] = []
        for axis, size in mesh.shape.items():
            free = [name for name in names if extents[name] >= size]
            if free and self.rng.random() < 0.7:
                name = str(self.rng.choice(free))
                names.remove(name)
                pairs.append((name, axis))
        if not pairs:
            return dist.ReplicateSpec()
        return dist.ShardSpec([name for name, _ in pairs], [axis for _, axis in pairs])


@pytest.mark.parametrize("plan", range(-(-PROGRAMS // PROGRAMS_PER_PLAN)))
def test_random_programs_equal_numpy(plan: int) -> None:
    rng = np.random.default_rng(plan)
    mesh, one_rank = make_mesh(**MESHES[plan % len(MESHES)]), make_mesh(tp=1)
    programs = [RandomProgram(rng, mesh, one_rank, f"p{i}") for i in range(PROGRAMS_PER_PLAN)]
    on_one, on_many = (
        graph.compile(*(program.trace(on_one_rank) for program in programs)) for on_one_rank in (True, False)
    )
    with (
        rt.open_session(on_one) as threads,
        rt.open_session(on_many, ranks="processes", oversubscribe=True) as processes,
    ):
        for program in programs:
            for run in (threads, processes):
                found = run.run(program.name, program.x).gather()
                error = relative_error(found, program.exact[-1])
                assert error < 2e-5, f"plan {plan}, program {program.name}: {error}\n{program.trace(False).text()}"
