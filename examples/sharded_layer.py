"""A feed-forward layer, sharded by hand: what moves between its ranks, and the same numbers on every mesh.

    python examples/sharded_layer.py
"""

import numpy as np

from tessera import dist, graph, op
from tessera import runtime as rt

TOKENS, WIDTH, INNER = 32, 64, 256


def plan_layer(mesh: dist.Mesh, up: np.ndarray, down: np.ndarray) -> graph.Plan:
    """Shards the output features of the first matmul and the input features of the second over ``tp``."""
    opened = dist.distribute(up, mesh, dist.ShardSpec(partition=("col",), mesh_axes=("tp",)))
    closed = dist.distribute(down, mesh, dist.ShardSpec(partition=("row",), mesh_axes=("tp",)))
    expand, project = op.linear(activation="silu"), op.linear()

    def feed_forward(x: graph.Value) -> graph.Value:
        return project(expand(x, opened), closed)

    tokens = graph.ArraySpec((TOKENS, WIDTH), mesh, dims=("token", "hidden"))
    return graph.trace(feed_forward, tokens).compile()


def main() -> None:
    rng = np.random.default_rng(1)
    up, down = (rng.standard_normal(shape, dtype=np.float32) for shape in ((INNER, WIDTH), (WIDTH, INNER)))
    x = rng.standard_normal((TOKENS, WIDTH), dtype=np.float32)
    inner = x.astype(np.float64) @ up.T
    expected = (inner / (1 + np.exp(-inner))) @ down.T
    for ranks in (1, 2, 4):
        plan = plan_layer(dist.Mesh(axes=["tp"], shape={"tp": ranks}), up, down)
        with rt.open_session(plan) as run:
            found = run(x).gather()
        error = np.abs(found - expected).max() / np.abs(expected).max()
        print(f"tp={ranks}: largest relative error {error:.1e}; rank 0 issues {plan.collectives()}")
    print(plan.explain())


if __name__ == "__main__":
    main()
