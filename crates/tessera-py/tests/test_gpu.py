"""Programs on the GPUs of this host, beside numpy. Without a GPU they are skipped, unless TESSERA_REQUIRE_GPUS is set."""

from __future__ import annotations

import gc
import importlib
import os
from typing import Any

import numpy as np
import pytest
from helpers import REPLICATED, Array, attend, draw, make_mesh, mix_experts, relative_error, shard
from numpy.typing import NDArray
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt

GPUS = int(os.environ.get("TESSERA_REQUIRE_GPUS", "0"))


def open_on_gpus(plan: graph.Plan) -> rt.Session:
    """Loads a plan on GPUs, or skips the test where there are none."""
    try:
        return rt.open_session(plan, ranks="processes", device="gpu")
    except TesseraError as error:
        if GPUS >= plan.mesh.size:
            raise
        pytest.skip(f"{plan.mesh.size} GPUs: {error.code}, {error.message}")


MESHES = [{"tp": 1}, {"tp": 2}, {"ep": 2}]


@pytest.mark.parametrize("sizes", MESHES)
def test_a_block_equals_numpy(rng: np.random.Generator, sizes: dict[str, int]) -> None:
    mesh = make_mesh(**sizes)
    by_head = shard(col="tp") if "tp" in sizes else REPLICATED
    by_expert = shard(experts="ep") if "ep" in sizes else REPLICATED
    heads, width, experts, inner = 4, 256, 8, 96
    projections = [draw(rng, width, width) / 16 for _ in range(3)]
    router = draw(rng, experts, width) / 16
    banks = [draw(rng, experts, *shape) / 16 for shape in ((inner, width), (inner, width), (width, inner))]
    units = {"units": {"col": width // heads}}
    weights = [dist.distribute(w, mesh, by_head, **units) for w in projections]  # type: ignore[arg-type]
    spread = [dist.distribute(bank, mesh, by_expert) for bank in banks]
    gate = dist.distribute(router, mesh, REPLICATED)
    linear, attention = op.linear(), op.flash_attention(heads, width // heads, causal=True)
    mixture = op.moe(num_experts=experts, top_k=2, capacity_factor=float(experts))

    def block(x: graph.Value) -> graph.Value:
        return mixture(attention(*(linear(x, w) for w in weights)), gate, *spread)

    plan = graph.trace(block, graph.ArraySpec((48, width), mesh, dims=("token", "hidden"))).compile()
    x = draw(rng, 48, width)
    q, k, v = ((x.astype(np.float64) @ w.T).astype(np.float32) for w in projections)
    attended = attend(q, k, v, heads, causal=True).astype(np.float32)
    expected = mix_experts(attended, attended.astype(np.float64) @ router.T, banks, 2)
    with open_on_gpus(plan) as on_gpus:
        first, again = (on_gpus(x).gather() for _ in range(2))
    assert relative_error(first, expected) < 1e-5
    assert np.array_equal(first, again)
    with rt.open_session(plan) as on_threads:
        assert relative_error(on_threads(x).gather(), expected) < 1e-5


def test_redistribution_on_gpus_is_exact(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    silu = op.silu()
    spec = graph.ArraySpec((64, 32), mesh, shard(token="tp"), dims=("token", "hidden"))
    plan = graph.trace(lambda x: silu(x), spec).compile()
    x = draw(rng, 64, 32)
    with open_on_gpus(plan) as run:
        y = run(x)
    assert y.sharding == {"token": "tp"}
    assert relative_error(y.gather(), x / (1 + np.exp(-x.astype(np.float64)))) < 1e-6


def import_torch() -> Any:
    """Returns torch with a GPU, or skips the test on a machine without one."""
    if GPUS == 0:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch finds no GPU")
        return torch
    # Type checkers run on machines without torch.
    required = importlib.import_module("torch")

    assert required.cuda.is_available(), "TESSERA_REQUIRE_GPUS is set, but torch finds no GPU"
    return required


@pytest.fixture
def torch() -> Any:
    return import_torch()


def one_gpu(ranks: int = 1) -> dist.Mesh:
    """Returns a mesh whose ranks all have their arrays on the first GPU, which only arrays may do."""
    names = ["GPU0", "gpu0", "cuda:0", "0"]
    return dist.Mesh(axes=["tp"], shape={"tp": ranks}, devices=names[:ranks])


def trace_layer(mesh: dist.Mesh, weight: Array, tokens: int) -> graph.Plan:
    """Returns the plan of y = silu(x W'), with x as input."""
    layer = op.linear(activation="silu")
    w = dist.distribute(weight, mesh, REPLICATED)
    spec = graph.ArraySpec((tokens, weight.shape[1]), mesh, dims=("token", "hidden"))
    return graph.trace(lambda x: layer(x, w), spec).compile()


def expected_layer(x: Array, weight: Array) -> NDArray[np.float64]:
    """Returns silu(x W') in float64."""
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    activated: NDArray[np.float64] = y / (1 + np.exp(-y))
    return activated


def open_thread(plan: graph.Plan) -> rt.Session:
    """Loads a plan of one rank on a GPU of this process."""
    return rt.open_session(plan, ranks="threads", device="gpu")


def test_contiguous_shards_share_the_memory_of_torch(torch: Any) -> None:
    source = torch.arange(12 * 10, dtype=torch.float32, device="cuda:0").reshape(12, 10)
    start, before = source.data_ptr(), torch.cuda.current_device()
    whole = dist.distribute(source, one_gpu(), REPLICATED, copy=False)
    assert (whole.device, whole.local(0).device) == ("gpu", "gpu:0") and "on GPUs" in repr(whole)
    assert torch.from_dlpack(whole).data_ptr() == torch.from_dlpack(whole.local(0)).data_ptr() == start
    rows = dist.distribute(source, one_gpu(3), shard(col="tp"), copy=False)
    for rank in range(3):
        view = torch.from_dlpack(rows.local(rank))
        assert view.data_ptr() == start + rank * 4 * 10 * 4
        assert view.device == source.device and torch.equal(view, source[4 * rank : 4 * rank + 4])
    assert torch.cuda.current_device() == before
    assert np.array_equal(rows.gather(), source.cpu().numpy())


def test_other_shards_are_copied_on_the_gpu(torch: Any) -> None:
    source = torch.arange(12 * 10, dtype=torch.float32, device="cuda:0").reshape(12, 10)
    columns = dist.distribute(source, one_gpu(3), shard(row="tp"))
    sizes = [4, 3, 3]
    for rank, (size, first) in enumerate(zip(sizes, [0, 4, 7], strict=True)):
        view = torch.from_dlpack(columns.local(rank))
        assert view.is_contiguous() and torch.equal(view, source[:, first : first + size])
    assert np.array_equal(columns.gather(), source.cpu().numpy())
    with pytest.raises(TesseraError) as refused:
        dist.distribute(source, one_gpu(3), shard(row="tp"), copy=False)
    assert refused.value.code == "T0099" and "contiguous" in str(refused.value)
    with pytest.raises(TesseraError) as refused:
        torch.from_dlpack(columns)
    assert refused.value.code == "T0099" and "local(rank)" in str(refused.value.hint)
    own = dist.distribute(source, one_gpu(), REPLICATED, copy=True)
    assert torch.from_dlpack(own).data_ptr() != source.data_ptr()
    cube = torch.arange(4 * 6 * 10, dtype=torch.float32, device="cuda:0").reshape(4, 6, 10)
    middle = dist.distribute(cube[:, :, 2:9], one_gpu(2), shard(col="tp"))
    assert np.array_equal(middle.gather(), cube[:, :, 2:9].cpu().numpy())


def test_tensors_that_no_copy_of_runs_makes_are_refused(torch: Any) -> None:
    source = torch.zeros(12, 10, device="cuda:0")
    for other in (source.T, source[:, ::2], source[:1].expand(4, 10)):
        with pytest.raises(TesseraError) as refused:
            dist.distribute(other, one_gpu(), REPLICATED)
        assert refused.value.code == "T0099" and "contiguous" in str(refused.value.hint)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        with pytest.raises(TesseraError) as refused:
            dist.distribute(source.to(dtype), one_gpu(), REPLICATED)
        assert refused.value.code == "T1502" and str(dtype).removeprefix("torch.") in str(refused.value)
    many = dist.Mesh(axes=["tp"], shape={"tp": torch.cuda.device_count() + 1})
    with pytest.raises(TesseraError) as refused:
        dist.distribute(source, many, REPLICATED)
    assert refused.value.code == "T0776"


def test_memory_on_a_gpu_lives_as_long_as_its_views(torch: Any) -> None:
    def fill() -> None:
        """Takes the memory that torch has free, so that memory that was freed too early changes."""
        torch.cuda.synchronize()
        blocks = [torch.full((1 << 18,), -1.0, device="cuda:0") for _ in range(64)]
        torch.cuda.synchronize()
        del blocks

    # Tests before this one may have left cycles that hold memory.
    gc.collect()
    source = torch.arange(1 << 18, dtype=torch.float32, device="cuda:0").reshape(512, 512)
    expected, held = source.cpu(), torch.cuda.memory_allocated()
    shared = dist.distribute(source, one_gpu(), REPLICATED, copy=False)
    del source
    gc.collect()
    fill()
    assert torch.cuda.memory_allocated() == held
    assert np.array_equal(shared.gather(), expected.numpy())
    view = torch.from_dlpack(shared.local(0))
    del shared
    gc.collect()
    fill()
    assert torch.equal(view.cpu(), expected)
    del view
    gc.collect()
    assert torch.cuda.memory_allocated() == held - expected.nbytes
    own = dist.distribute(expected.cuda(), one_gpu(2), shard(row="tp"))
    view = torch.from_dlpack(own.local(1))
    del own
    gc.collect()
    fill()
    assert torch.equal(view.cpu(), expected[:, 256:])


def test_a_session_takes_and_returns_torch_tensors(torch: Any, rng: np.random.Generator) -> None:
    weight, x = draw(rng, 96, 64) * np.float32(1 / 8), draw(rng, 48, 64)
    plan = trace_layer(one_gpu(), weight, 48)
    source = torch.from_numpy(x).cuda()
    before = torch.cuda.current_device()
    with open_thread(plan) as run:
        assert run.process_ids == []
        outputs = [run(source), run(dist.distribute(source, plan.mesh, REPLICATED, copy=False)), run(x)]
        views = [torch.from_dlpack(y.local(0)) for y in outputs]
        assert len({view.data_ptr() for view in views}) == 3, "every call has outputs of its own"
        again = run(-source)
        assert not np.array_equal(again.gather(), outputs[0].gather())
    assert torch.cuda.current_device() == before
    assert {y.device for y in outputs} == {"gpu"} and outputs[0].local(0).device == "gpu:0"
    assert relative_error(outputs[0].gather(), expected_layer(x, weight)) < 1e-5
    # The bits do not depend on where the input came from, and outputs outlive the session.
    for y, view in zip(outputs, views, strict=True):
        assert np.array_equal(y.gather(), outputs[0].gather())
        assert np.array_equal(view.cpu().numpy(), outputs[0].gather())
    with pytest.raises(TesseraError) as refused:
        np.asarray(outputs[0])
    assert refused.value.code == "T0099" and "gather" in str(refused.value.hint)


def test_several_inputs_and_outputs_may_be_anywhere(torch: Any, rng: np.random.Generator) -> None:
    mesh = one_gpu()
    spec = graph.ArraySpec((6, 8), mesh, dims=("token", "hidden"))
    plan = graph.trace(lambda x, y: (x + y, x * y), spec, spec).compile()
    x, y = draw(rng, 6, 8), draw(rng, 6, 8)
    columns = torch.zeros(6, 16, device="cuda:0")
    columns[:, 4:12] = torch.from_numpy(y).cuda()
    with open_thread(plan) as run:
        total, scaled = run(x, columns[:, 4:12])
        assert np.array_equal(total.gather(), x + y) and np.array_equal(scaled.gather(), x * y)
        total, _ = run(total, scaled)
        assert np.array_equal(total.gather(), x + y + x * y)


def test_streams_wait_for_one_another(torch: Any, rng: np.random.Generator) -> None:
    size = 2048
    weight = np.eye(size, dtype=np.float32)
    plan = trace_layer(one_gpu(), weight, size)
    base = torch.from_numpy(draw(rng, size, size) * np.float32(size**-0.5)).cuda()
    expected = base
    for _ in range(40):
        expected = torch.tanh(expected @ base) + 1
    torch.cuda.synchronize()
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with open_thread(plan) as run:
        run(base)
        with torch.cuda.stream(producer):
            x = base
            for _ in range(40):
                x = torch.tanh(x @ base) + 1
            busy = not producer.query()
            y = run(x)
        with torch.cuda.stream(consumer):
            doubled = 2 * torch.from_dlpack(y.local(0))
            del y
        consumer.synchronize()
    assert busy, "the input was complete before the call, so the test shows nothing"
    assert torch.allclose(doubled, 2 * torch.nn.functional.silu(expected), rtol=1e-3, atol=1e-3)
    # A tensor that is shared while its stream computes it.
    with torch.cuda.stream(producer):
        x = base
        for _ in range(40):
            x = torch.tanh(x @ base) + 1
        shared = dist.distribute(x, one_gpu(), REPLICATED, copy=False)
        columns = dist.distribute(x, one_gpu(2), shard(row="tp"))
    with torch.cuda.stream(consumer):
        total = torch.from_dlpack(shared.local(0)) + 0
    # Matmuls on several streams may differ in their last bits.
    for found in (shared.gather(), columns.gather()):
        assert np.allclose(found, expected.cpu().numpy(), rtol=1e-3, atol=1e-3)
    consumer.synchronize()
    assert torch.allclose(total, expected, rtol=1e-3, atol=1e-3)
    local = shared.local(0)
    with pytest.raises(ValueError, match="stream = 0"):
        local.__dlpack__(stream=0)
    for stream in (None, -1, 1, 2):
        local.__dlpack__(stream=stream)


def test_what_has_no_rank_on_the_gpu_refuses_its_arrays(torch: Any, rng: np.random.Generator) -> None:
    weight = draw(rng, 8, 8)
    plan = trace_layer(one_gpu(), weight, 4)
    x = torch.zeros(4, 8, device="cuda:0")
    tensor = dist.distribute(x, one_gpu(), REPLICATED)
    with rt.open_session(plan) as on_cpus:
        for source in (x, tensor):
            with pytest.raises(TesseraError) as refused:
                on_cpus(source)
            assert refused.value.code == "T0099"
        assert on_cpus(tensor.gather()).device == "cpu"
    for refuse in (
        lambda: tensor + tensor,
        lambda: tensor.redistribute(REPLICATED),
        lambda: graph.trace(lambda y: y + tensor, tensor),
    ):
        with pytest.raises(TesseraError) as refused:
            refuse()
        assert refused.value.code == "T0099"
    too_many = dist.Mesh(axes=["tp"], shape={"tp": torch.cuda.device_count() + 1})
    with pytest.raises(TesseraError) as refused:
        open_thread(trace_layer(too_many, weight, 4))
    assert refused.value.code == "T1304"
    if torch.cuda.device_count() > 1:
        with open_thread(plan) as run:
            with torch.cuda.device(1), pytest.raises(TesseraError) as refused:
                run(torch.zeros(4, 8, device="cuda:1"))
            assert refused.value.code == "T0099"
            assert run(x).shape == (4, 8), "a refused call ends nothing"


def test_an_output_that_is_not_finite_ends_the_session(torch: Any, rng: np.random.Generator) -> None:
    plan = trace_layer(one_gpu(), draw(rng, 8, 8), 4)
    x = torch.zeros(4, 8, device="cuda:0")
    with open_thread(plan) as run:
        assert np.array_equal(run(x).gather(), np.zeros((4, 8)))
        with pytest.raises(TesseraError) as wrong_shape:
            run(x[:2])
        assert wrong_shape.value.code == "T0091"
        x[2, 3] = float("nan")
        with pytest.raises(TesseraError) as found:
            run(x)
        assert found.value.code == "T0771" and "8 of 32" in str(found.value) and "element 16" in str(found.value)
        with pytest.raises(TesseraError) as ended:
            run(torch.zeros(4, 8, device="cuda:0"))
        assert ended.value.code == "T0092"


def test_closing_a_session_frees_its_memory(torch: Any, rng: np.random.Generator) -> None:
    weight = draw(rng, 8192, 8192)
    plan = trace_layer(one_gpu(), weight, 16)
    x = torch.zeros(16, 8192, device="cuda:0")
    free = []
    for _ in range(3):
        with open_thread(plan) as run:
            run(x)
            loaded = torch.cuda.mem_get_info()[0]
        free.append(torch.cuda.mem_get_info()[0])
        assert free[-1] - loaded >= weight.nbytes
    assert abs(free[2] - free[1]) < weight.nbytes // 4


def test_jax_shares_memory_of_gpus(torch: Any) -> None:
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"jax finds no GPU: {error}")
    source = jax.device_put(np.arange(12 * 16, dtype=np.float32).reshape(12, 16), device)
    start = source.unsafe_buffer_pointer()
    shared = dist.distribute(source, one_gpu(), REPLICATED, copy=False)
    assert jax.dlpack.from_dlpack(shared.local(0)).unsafe_buffer_pointer() == start
    assert torch.from_dlpack(shared.local(0)).data_ptr() == start
    del source
    gc.collect()
    assert np.array_equal(shared.gather(), np.arange(12 * 16, dtype=np.float32).reshape(12, 16))
