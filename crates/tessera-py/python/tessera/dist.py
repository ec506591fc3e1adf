"""Meshes, layouts, and arrays that are distributed over a mesh."""

from ._native import DTensor, Mesh, ReplicateSpec, ShardSpec, distribute

__all__ = ["DTensor", "Mesh", "ReplicateSpec", "ShardSpec", "distribute"]
