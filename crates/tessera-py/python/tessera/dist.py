"""Meshes, layouts, and arrays that are distributed over a mesh."""

from ._native import DTensor, LocalArray, Mesh, ReplicateSpec, ShardSpec, distribute

__all__ = ["DTensor", "LocalArray", "Mesh", "ReplicateSpec", "ShardSpec", "distribute"]
