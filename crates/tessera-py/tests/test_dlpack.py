"""Arrays that travel by DLPack in host memory: to and from numpy, torch and jax, without a copy where one can be avoided."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from helpers import REPLICATED, Array, draw, make_mesh, shard
from numpy.typing import NDArray
from tessera import TesseraError, dist, graph, op
from tessera import runtime as rt


def address(array: Any) -> int:
    """Returns the address of the first element of a numpy array."""
    pointer: int = array.__array_interface__["data"][0]
    return pointer


class Producer:
    """An array of another library: it hands out memory of numpy's by DLPack, and numpy cannot reach it otherwise."""

    def __init__(self, array: NDArray[Any], knows_versions: bool = True) -> None:
        self.array = array
        self.knows_versions = knows_versions
        self.calls = 0

    def __dlpack__(self, **options: Any) -> Any:
        self.calls += 1
        if "max_version" in options and not self.knows_versions:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class OldConsumer:
    """The consumer of a capsule without a version, as C sees it."""

    class Tensor(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("device_kind", ctypes.c_int32),
            ("device_index", ctypes.c_int32),
            ("dim_count", ctypes.c_int32),
            ("type_code", ctypes.c_uint8),
            ("type_bits", ctypes.c_uint8),
            ("type_lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("byte_offset", ctypes.c_uint64),
            ("context", ctypes.c_void_p),
            ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        )

    def __init__(self, capsule: Any) -> None:
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
        self.used_name = b"used_dltensor"
        self.pointer = get(capsule, b"dltensor")
        rename(capsule, self.used_name)
        self.capsule = capsule
        self.tensor = ctypes.cast(self.pointer, ctypes.POINTER(OldConsumer.Tensor)).contents

    def delete(self) -> None:
        """Frees the tensor."""
        self.tensor.deleter(self.pointer)


def test_every_shard_is_a_view_for_numpy(rng: np.random.Generator) -> None:
    array = draw(rng, 6, 10)
    for spec in (REPLICATED, shard(col="tp"), shard(row="tp")):
        tensor = dist.distribute(array, make_mesh(tp=2), spec)
        for rank in range(2):
            local = tensor.local(rank)
            by_dlpack, by_array = np.from_dlpack(local), np.asarray(local)
            assert address(by_dlpack) == address(by_array) == address(local.to_host())
            assert address(array) <= address(by_dlpack) < address(array) + array.nbytes
            assert np.array_equal(by_dlpack, by_array) and by_dlpack.shape == local.shape
            assert (local.dtype, local.device, len(local)) == ("float32", "cpu", local.shape[0])
            assert not by_dlpack.flags.writeable and not by_array.flags.writeable
    assert repr(dist.distribute(array, make_mesh(tp=2), shard(col="tp")).local(1)) == (
        "LocalArray(float32, [3, 10], cpu)"
    )


def test_a_copy_belongs_to_its_consumer(rng: np.random.Generator) -> None:
    array = draw(rng, 6, 10)
    local = dist.distribute(array, make_mesh(tp=2), shard(row="tp")).local(1)
    copied = np.from_dlpack(local, copy=True)
    assert copied.flags.writeable and copied.flags.c_contiguous
    copied[:] = 0
    assert np.array_equal(local.to_host(), array[:, 5:])


def test_a_consumer_without_versions_reads_the_same_memory(rng: np.random.Generator) -> None:
    array = draw(rng, 6, 10)
    local = dist.distribute(array, make_mesh(tp=2), shard(row="tp")).local(1)
    old = OldConsumer(local.__dlpack__())
    tensor = old.tensor
    assert tensor.data + tensor.byte_offset == address(array) + 5 * 4
    assert (tensor.device_kind, tensor.device_index, tensor.dim_count) == (1, 0, 2)
    assert (tensor.type_code, tensor.type_bits, tensor.type_lanes) == (2, 32, 1)
    assert (tensor.shape[:2], tensor.strides[:2]) == ([6, 5], [10, 1])
    old.delete()


def test_memory_lives_as_long_as_its_consumers(rng: np.random.Generator) -> None:
    class Owner(np.ndarray[Any, np.dtype[np.float32]]):
        pass

    owner = draw(rng, 4, 4).view(Owner)
    array = owner.copy()
    assert isinstance(array, Owner)
    alive = weakref.ref(array)
    view = np.from_dlpack(dist.distribute(array, make_mesh(tp=2), REPLICATED).local(0))
    capsule = dist.distribute(array, make_mesh(tp=2), REPLICATED).local(0).__dlpack__()
    del array
    gc.collect()
    assert alive() is not None and np.array_equal(view, owner)
    old = OldConsumer(capsule)
    del view
    gc.collect()
    assert alive() is not None, "the capsule holds the memory"
    old.delete()
    assert alive() is None
    fresh = owner.copy()
    alive = weakref.ref(fresh)
    capsule = dist.distribute(fresh, make_mesh(tp=2), REPLICATED).local(0).__dlpack__(max_version=(1, 0))
    del fresh, capsule
    gc.collect()
    assert alive() is None, "a capsule that nobody takes frees its tensor"


@pytest.mark.parametrize("knows_versions", [True, False])
def test_memory_of_another_library_is_shared_until_the_tensor_ends(knows_versions: bool) -> None:
    class Owner(np.ndarray[Any, np.dtype[np.float32]]):
        pass

    array = np.arange(12, dtype=np.float32).reshape(3, 4).view(Owner).copy()
    alive, start = weakref.ref(array), address(array)
    producer = Producer(array, knows_versions)
    tensor = dist.distribute(producer, make_mesh(tp=2), REPLICATED)
    del array, producer
    gc.collect()
    assert alive() is not None
    assert address(tensor.gather()) == start and tensor.gather()[2, 3] == 11
    view = tensor.local(0).to_host()
    del tensor
    gc.collect()
    assert alive() is not None, "the view holds the memory"
    del view
    gc.collect()
    assert alive() is None, "the deleter was called"


def test_a_layout_or_a_caller_that_needs_a_copy_gets_one() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    mesh = make_mesh(tp=2)
    for source in (array.T, array[:, ::2], array[::-1], np.broadcast_to(array[0], (3, 6))):
        expected = source.copy()
        tensor = dist.distribute(Producer(source), mesh, REPLICATED)
        assert np.array_equal(tensor.gather(), expected)
        assert not np.shares_memory(tensor.gather(), array)
        with pytest.raises(TesseraError, match="row-major") as refused:
            dist.distribute(Producer(source), mesh, REPLICATED, copy=False)
        assert refused.value.code == "T1502"
    own = dist.distribute(Producer(array), mesh, REPLICATED, copy=True)
    assert not np.shares_memory(own.gather(), array)
    shared = dist.distribute(Producer(array), mesh, REPLICATED, copy=False)
    assert address(shared.gather()) == address(array)


def test_the_same_rule_holds_for_numpy(rng: np.random.Generator) -> None:
    array, mesh = draw(rng, 4, 6), make_mesh(tp=2)
    own = dist.distribute(array, mesh, REPLICATED, copy=True)
    assert array.flags.writeable and not np.shares_memory(own.gather(), array)
    with pytest.raises(TesseraError, match="copy") as refused:
        dist.distribute(array[:2], mesh, REPLICATED, copy=False)
    assert refused.value.code == "T1502"
    shared = dist.distribute(array, mesh, REPLICATED, copy=False)
    assert not array.flags.writeable and address(shared.gather()) == address(array)


def test_a_tensor_of_tensors_is_shared(rng: np.random.Generator) -> None:
    array, mesh = draw(rng, 4, 6), make_mesh(tp=2)
    tensor = dist.distribute(array, mesh, shard(col="tp"))
    for source in (tensor, tensor.local(0)):
        again = dist.distribute(source, mesh, REPLICATED)
        assert address(again.gather()) == address(array)


def test_arrays_without_elements_and_without_dims() -> None:
    mesh = make_mesh(tp=2)
    empty = dist.distribute(Producer(np.zeros((0, 4), np.float32)), mesh, REPLICATED)
    assert np.from_dlpack(empty.local(0)).shape == (0, 4)
    number = dist.distribute(Producer(np.full((), 7, np.float32)), mesh, REPLICATED, dims=())
    assert np.from_dlpack(number) == 7
    with pytest.raises(TypeError, match="no length"):
        len(number.local(0))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.complex64])
def test_other_dtypes_are_refused_by_name(dtype: Any) -> None:
    with pytest.raises(TesseraError) as refused:
        dist.distribute(Producer(np.zeros((2, 2), dtype)), make_mesh(tp=2), REPLICATED)
    assert refused.value.code == "T1502" and np.dtype(dtype).name in str(refused.value)


def test_what_the_protocol_excludes_is_refused(rng: np.random.Generator) -> None:
    local = dist.distribute(draw(rng, 4, 6), make_mesh(tp=2), REPLICATED).local(0)
    with pytest.raises(BufferError, match="moves to no other"):
        local.__dlpack__(dl_device=(2, 0))
    with pytest.raises(ValueError, match="no streams"):
        local.__dlpack__(stream=1)

    class Elsewhere(Producer):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (10, 0)

    with pytest.raises(TesseraError) as refused:
        dist.distribute(Elsewhere(np.zeros((2, 2), np.float32)), make_mesh(tp=2), REPLICATED)
    assert refused.value.code == "T0099"

    class Twice(Producer):
        capsule: Any = None

        def __dlpack__(self, **options: Any) -> Any:
            self.capsule = self.capsule or super().__dlpack__(**options)
            return self.capsule

    twice = Twice(np.zeros((2, 2), np.float32))
    dist.distribute(twice, make_mesh(tp=2), REPLICATED)
    with pytest.raises(BufferError, match="consumed before"):
        dist.distribute(twice, make_mesh(tp=2), REPLICATED)


def test_a_call_copies_tensors_of_other_libraries(rng: np.random.Generator) -> None:
    silu = op.silu()
    plan = graph.trace(lambda x: silu(x), graph.ArraySpec((3, 4), make_mesh(tp=2), dims=("token", "hidden"))).compile()
    x = draw(rng, 3, 4)
    with rt.open_session(plan) as run:
        y = run(Producer(x))
        assert x.flags.writeable
        assert np.array_equal(y.gather(), run(x).gather())
        again = run(y.local(0))
    assert again.shape == (3, 4)


def test_torch_shares_memory_in_both_directions(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    array, mesh = draw(rng, 6, 10), make_mesh(tp=2)
    tensor = dist.distribute(array, mesh, shard(row="tp"))
    for rank in range(2):
        view = torch.from_dlpack(tensor.local(rank))
        assert view.data_ptr() == address(array) + rank * 5 * 4
        assert np.array_equal(view.numpy(), array[:, 5 * rank : 5 * rank + 5])
    assert torch.from_dlpack(tensor).data_ptr() == address(array)
    assert torch.from_dlpack(tensor.local(1), copy=True).data_ptr() != address(array) + 20

    source = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    start = source.data_ptr()
    shared = dist.distribute(source, mesh, shard(col="tp"), copy=False)
    assert address(shared.gather()) == start
    assert address(dist.distribute(source[1:3], mesh, REPLICATED).gather()) == start + 24
    assert np.array_equal(dist.distribute(source.T, mesh, REPLICATED).gather(), source.T.numpy())
    del source
    gc.collect()
    assert torch.from_dlpack(shared.local(1)).data_ptr() == start + 2 * 24
    assert shared.gather()[3, 5] == 23
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(TesseraError) as refused:
            dist.distribute(torch.zeros(2, 2, dtype=dtype), mesh, REPLICATED)
        assert refused.value.code == "T1502" and str(dtype).removeprefix("torch.") in str(refused.value)


def aligned(*shape: int) -> Array:
    """Returns an array of zeros at an address that is a multiple of 64, as jax needs to share memory."""
    count = int(np.prod(shape))
    memory = np.zeros(count + 16, np.float32)
    start = -address(memory) % 64 // 4
    memory.flags.writeable = False
    return memory[start : start + count].reshape(shape)


def test_jax_shares_memory_in_both_directions() -> None:
    jax = pytest.importorskip("jax")
    array, mesh = aligned(6, 16), make_mesh(tp=2)
    tensor = dist.distribute(array, mesh, shard(col="tp"))
    for rank in range(2):
        view = jax.dlpack.from_dlpack(tensor.local(rank))
        assert view.unsafe_buffer_pointer() == address(array) + rank * 3 * 64
        assert np.array_equal(np.asarray(view), array[3 * rank : 3 * rank + 3])

    on_host = jax.devices("cpu")[0]
    source = jax.device_put(np.arange(24, dtype=np.float32).reshape(4, 6), on_host)
    start = source.unsafe_buffer_pointer()
    shared = dist.distribute(source, mesh, shard(col="tp"), copy=False)
    del source
    gc.collect()
    assert address(shared.gather()) == start and shared.gather()[3, 5] == 23
