"""A block of a model with experts, mapped onto a rack of 72 devices that are not here, and run on 4 ranks that are.

    python examples/map_a_model.py
"""

import numpy as np

from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt


def plan_block(mesh: dist.Mesh, tokens: int, heads: int, experts: int) -> graph.Plan:
    """Plans attention with heads over ``tp``, and experts over ``ep``."""
    rng = np.random.default_rng(2)
    width, inner, head_dim = heads * 8, 32, 8

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))

    whole = dist.ReplicateSpec(mesh_axes=("tp", "ep"))
    by_head = dist.ShardSpec(partition=("col",), mesh_axes=("tp",))
    by_expert = dist.ShardSpec(partition=("experts",), mesh_axes=("ep",))
    weights = [dist.distribute(draw(width, width), mesh, by_head, units={"col": head_dim}) for _ in "qkv"]
    output = dist.distribute(
        draw(width, width), mesh, dist.ShardSpec(partition=("row",), mesh_axes=("tp",)), units={"row": head_dim}
    )
    router = dist.distribute(draw(experts, width), mesh, whole)
    banks = [
        dist.distribute(draw(experts, *shape), mesh, by_expert)
        for shape in ((inner, width), (inner, width), (width, inner))
    ]
    linear = op.linear()
    attention = op.flash_attention(num_heads=heads, head_dim=head_dim)
    mixture = op.moe(num_experts=experts, top_k=2, gate="topk_softmax_locality_penalized")

    def block(x: graph.Value) -> graph.Value:
        q, k, v = (linear(x, weight) for weight in weights)
        attended = x + linear(attention(q, k, v), output)
        return attended + mixture(attended, router, *banks)

    return graph.trace(block, graph.ArraySpec((tokens, width), mesh, dims=("token", "hidden"))).compile()


def main() -> None:
    rack = dist.Mesh(
        axes=["tp", "ep", "pp", "dp"],
        shape={"tp": 12, "ep": 6, "pp": 1, "dp": 1},
        devices=[f"GPU{i}" for i in range(72)],
    )
    print(plan_block(rack, tokens=64, heads=24, experts=48).explain())

    # The same function on ranks of this host.
    plan = plan_block(dist.Mesh(axes=["tp", "ep"], shape={"tp": 2, "ep": 2}), tokens=16, heads=4, experts=8)
    with rt.open_session(plan) as run:
        x = np.random.default_rng(3).standard_normal((16, 32), dtype=np.float32)
        print("on 4 ranks:", run(x).gather()[0, :4])

    try:
        dist.Mesh(axes=["tp", "ep"], shape={"tp": 12, "ep": 12}, devices=[f"GPU{i}" for i in range(72)])
    except TesseraError as error:
        print(error)


if __name__ == "__main__":
    main()
