"""Functions as programs, programs as sealed plans, and planning by estimate."""

from ._native import (
    ArraySpec,
    Graph,
    Plan,
    Search,
    Topology,
    Value,
    compile,
    plan_memory,
    recipe,
    search,
    topology,
    trace,
)

__all__ = [
    "ArraySpec",
    "Graph",
    "Plan",
    "Search",
    "Topology",
    "Value",
    "compile",
    "plan_memory",
    "recipe",
    "search",
    "topology",
    "trace",
]
