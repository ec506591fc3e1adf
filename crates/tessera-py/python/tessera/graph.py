"""Functions as programs, programs as sealed plans, their files, and planning by estimate."""

from ._native import (
    ArraySpec,
    Graph,
    Plan,
    PlanEstimate,
    Search,
    Topology,
    Value,
    compile,
    load,
    load_plan,
    parse,
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
    "PlanEstimate",
    "Search",
    "Topology",
    "Value",
    "compile",
    "load",
    "load_plan",
    "parse",
    "plan_memory",
    "recipe",
    "search",
    "topology",
    "trace",
]
