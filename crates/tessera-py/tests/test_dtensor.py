"""Distributed arrays: shapes, memory, and exchanges between layouts."""

import os

import numpy as np
import pytest
from helpers import REPLICATED, draw, make_mesh, shard
from tessera import TesseraError, dist


def test_local_shapes_are_those_of_the_layout(rng: np.random.Generator) -> None:
    mesh = dist.Mesh(axes=["tp", "ep", "pp", "dp"], shape={"tp": 12, "ep": 6, "pp": 1, "dp": 1})
    weight = draw(rng, 48, 36)
    col = dist.distribute(weight, mesh, dist.ShardSpec(partition=("col",), mesh_axes=("tp",)))
    row = dist.distribute(weight, mesh, dist.ShardSpec(partition=("row",), mesh_axes=("tp",)))
    whole = dist.distribute(weight, mesh, dist.ReplicateSpec(mesh_axes=("tp", "ep", "pp", "dp")))
    assert (col.local_shape(5), row.local_shape(5), whole.local_shape(5)) == ((4, 36), (48, 3), (48, 36))
    assert whole.total_bytes == 72 * weight.nbytes
    bank = dist.distribute(draw(rng, 13, 4, 5), mesh, shard(experts="ep"))
    assert [bank.local_shape(rank)[0] for rank in range(0, 72, 12)] == [3, 2, 2, 2, 2, 2]


def test_heads_that_an_axis_does_not_divide_are_shared_unevenly(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=12)
    heads = dist.distribute(
        draw(rng, 2, 128 * 4), mesh, shard(head="tp"), dims=("token", "head"), units={"head": 4}
    )
    sizes = [heads.local_shape(rank)[1] // 4 for rank in range(12)]
    assert sizes == [11] * 8 + [10] * 4
    assert np.array_equal(np.concatenate([heads.local(r) for r in range(12)], axis=1), heads.gather())


def test_an_array_is_shared_and_frozen() -> None:
    array = np.zeros((1024, 1024, 256), np.float32)  # 1 GiB, of which no page is touched
    tensor = dist.distribute(array, make_mesh(tp=2), shard(row="tp"))
    assert tensor.gather().__array_interface__["data"][0] == array.__array_interface__["data"][0]
    assert tensor.local(1).to_host().base is not None
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        tensor.gather()[0, 0, 0] = 1


def test_memory_that_can_still_change_is_copied(rng: np.random.Generator) -> None:
    owner = draw(rng, 4, 6)
    view = dist.distribute(owner[:2], make_mesh(tp=2), REPLICATED)
    across = dist.distribute(owner.T, make_mesh(tp=2), REPLICATED)
    before = owner.copy()
    owner[:] = 0
    assert np.array_equal(view.gather(), before[:2])
    assert np.array_equal(across.gather(), before.T)


def test_memory_that_offers_writes_is_copied() -> None:
    buffer = bytearray(64)
    array = np.frombuffer(buffer, np.float32)
    array.flags.writeable = False
    tensor = dist.distribute(array.reshape(4, 4), make_mesh(tp=2), REPLICATED)
    buffer[:4] = b"\x00\x00\x80\x3f"
    assert tensor.gather()[0, 0] == 0
    fixed = np.frombuffer(bytes(64), np.float32).reshape(4, 4)
    shared = dist.distribute(fixed, make_mesh(tp=2), REPLICATED)
    assert shared.gather().__array_interface__["data"][0] == fixed.__array_interface__["data"][0]
    unaligned = np.frombuffer(b"\0" * 65, np.uint8)[1:].view(np.float32).reshape(4, 4)
    assert np.array_equal(dist.distribute(unaligned, make_mesh(tp=2), REPLICATED).gather(), np.zeros((4, 4)))


def test_results_outlive_their_tensor(rng: np.random.Generator) -> None:
    array = draw(rng, 6, 4)
    expected = array.copy()
    local = dist.distribute(array, make_mesh(tp=2), shard(col="tp")).redistribute(shard(row="tp")).local(1)
    del array
    assert np.array_equal(local, expected[:, 2:])


def test_a_forked_process_runs_ops_of_its_own() -> None:
    array = dist.distribute(np.ones((4, 4), np.float32), make_mesh(tp=2), REPLICATED)
    assert (array + array).gather()[0, 0] == 2
    child = os.fork()
    if child == 0:
        os._exit(0 if (array + array).gather()[0, 0] == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_comparisons_are_refused() -> None:
    array = dist.distribute(np.ones((4, 4), np.float32), make_mesh(tp=2), REPLICATED)
    with pytest.raises(TypeError, match="truth value"):
        assert array == array
    with pytest.raises(ValueError, match="copy"):
        np.array(array, dtype=np.float64, copy=False)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TesseraError) as refused:
        dist.distribute(np.zeros((2, 2)), make_mesh(tp=2), REPLICATED)
    assert refused.value.code == "T1502" and "float64" in str(refused.value)


def test_names_of_dims_are_checked(rng: np.random.Generator) -> None:
    mesh = make_mesh(tp=2)
    with pytest.raises(TesseraError, match="no dim"):
        dist.distribute(draw(rng, 4, 4), mesh, shard(experts="tp"))
    with pytest.raises(TesseraError, match="1 names"):
        dist.distribute(draw(rng, 4, 4), mesh, REPLICATED, dims=("token",))
    with pytest.raises(TesseraError, match="no names by default"):
        dist.distribute(draw(rng, 2, 2, 2, 2), mesh, REPLICATED)


def test_dlpack_shares_memory(rng: np.random.Generator) -> None:
    tensor = dist.distribute(draw(rng, 3, 4), make_mesh(tp=2), REPLICATED)
    assert tensor.__dlpack_device__() == (1, 0)
    array = np.from_dlpack(tensor)
    assert array.__array_interface__["data"] == tensor.gather().__array_interface__["data"]
    assert np.array_equal(np.asarray(tensor), array)


LAYOUTS: list[dist.ReplicateSpec | dist.ShardSpec] = [
    REPLICATED,
    shard(row="tp"),
    shard(col="tp"),
    shard(row="ep"),
    shard(col="ep"),
    shard(row="tp", col="ep"),
    shard(col="tp", row="ep"),
]


@pytest.mark.parametrize("shape", [(6, 12), (7, 5)])
def test_every_layout_becomes_every_other_and_back(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    mesh = make_mesh(tp=2, ep=3)
    array = draw(rng, *shape)
    for first, second in ((a, b) for a in LAYOUTS for b in LAYOUTS):
        tensor = dist.distribute(array, mesh, first)
        there = tensor.redistribute(second)
        back = there.redistribute(first)
        assert there.sharding == dist.distribute(array, mesh, second).sharding
        assert np.array_equal(there.gather(), array) and np.array_equal(back.gather(), array)
