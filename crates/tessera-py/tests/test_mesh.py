"""Meshes and layouts: what is accepted, what is refused, and how ranks are numbered."""

import pytest
from helpers import make_mesh, shard
from tessera import TesseraError, dist

RACK = {"tp": 12, "ep": 6, "pp": 1, "dp": 1}


def rack(devices: list[str] | None = None) -> dist.Mesh:
    return dist.Mesh(axes=["tp", "ep", "pp", "dp"], shape=RACK, devices=devices)


def test_the_first_axis_varies_fastest() -> None:
    mesh = rack([f"GPU{i}" for i in range(72)])
    assert [mesh.coord(rank)["tp"] for rank in (0, 1, 6, 12)] == [0, 1, 6, 0]
    assert [mesh.coord(rank)["ep"] for rank in (0, 1, 6, 12)] == [0, 0, 0, 1]
    assert mesh.rank(tp=0, ep=1) == 12
    assert mesh.devices[12] == "GPU12"
    assert (mesh.axes, mesh.shape, len(mesh)) == (["tp", "ep", "pp", "dp"], RACK, 72)


@pytest.mark.parametrize(
    ("devices", "code", "words"),
    [
        ([f"GPU{i}" for i in range(71)], "T0103", ["71", "72"]),
        (["GPU0", *[f"GPU{i}" for i in range(71)]], "T0103", ["GPU0"]),
        ([f"GPU{i}" for i in range(144)], "T0103", ["144", "72"]),
    ],
)
def test_devices_that_do_not_fit_are_refused(devices: list[str], code: str, words: list[str]) -> None:
    with pytest.raises(TesseraError) as refused:
        rack(devices)
    assert refused.value.code == code
    assert all(word in str(refused.value) for word in words)


def test_axes_and_shape_name_the_same_axes() -> None:
    with pytest.raises(TesseraError, match="no size"):
        dist.Mesh(axes=["tp", "ep"], shape={"tp": 2})
    with pytest.raises(TesseraError, match="not among the axes"):
        dist.Mesh(axes=["tp"], shape={"tp": 2, "ep": 2})
    with pytest.raises(TesseraError, match="not in the order"):
        dist.Mesh(axes=["ep", "tp"], shape={"tp": 2, "ep": 2})
    with pytest.raises(TesseraError) as refused:
        dist.Mesh(axes=["mp"], shape={"mp": 2})
    assert refused.value.code == "T0101"


def test_a_spec_names_each_dim_and_axis_once() -> None:
    with pytest.raises(TesseraError) as refused:
        dist.ShardSpec(partition=("column",), mesh_axes=("tp",))
    assert refused.value.code == "T0105"
    for partition, axes in [(("col", "row"), ("tp",)), (("col", "col"), ("tp", "ep")), (("col", "row"), ("tp", "tp"))]:
        with pytest.raises(TesseraError) as refused:
            dist.ShardSpec(partition=partition, mesh_axes=axes)
        assert refused.value.code == "T0106"


def test_an_error_says_what_to_do() -> None:
    with pytest.raises(TesseraError) as refused:
        rack(["GPU0"])
    error = refused.value
    assert error.hint is not None and "one device per rank" in error.hint
    assert ("mesh", "tp=12, ep=6") in error.places
    assert "rank" in error.explain()
    assert repr(make_mesh(tp=2)) == "Mesh(tp=2, 2 devices)"
    assert shard(col="tp").mesh_axes == ["tp"]
