"""Writes the reference page of the package from its stubs: ``python tests/reference.py``. A test compares the page."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
PAGE = PACKAGE.parents[1] / "docs" / "reference" / "python.md"
MODULES = ("dist", "op", "graph", "runtime")

# What the mapping guide writes, the name here, and the test that runs it; or why it does not run.
GUIDE = [
    ("4.1", "`dist.Mesh(axes, shape, devices)`", "`dist.Mesh`", "test_guide.py::test_mesh_and_layouts_as_printed"),
    ("4.1", "`dist.ReplicateSpec(mesh_axes)`", "`dist.ReplicateSpec`", "test_dtensor.py::test_local_shapes_are_those_of_the_layout"),
    ("4.1", "`dist.ShardSpec(partition, mesh_axes)`", "`dist.ShardSpec`", "test_dtensor.py::test_local_shapes_are_those_of_the_layout"),
    ("0", "DTensor", "`dist.DTensor`, `dist.distribute`", "test_dtensor.py::test_every_layout_becomes_every_other_and_back"),
    ("10.3", "`op.numeric(…, scale, stochastic_round)`", "`op.numeric`", "test_guide.py::test_stochastic_numerics_as_printed"),
    ("4.1", "`op.numeric(dtype, accum, deterministic)`", "`op.numeric`", "test_deterministic.py::test_bits_do_not_depend_on_the_mesh"),
    ("4.1", "`op.flash_attention(…)`", "`op.flash_attention`", "test_graph.py::test_attention_with_sharded_heads"),
    ("4.1", "`op.moe(…)`", "`op.moe`", "test_graph.py::test_experts_equal_a_dense_reference"),
    ("4.1", "`op.set_router_regularizer(…)`", "`op.set_router_regularizer`", "test_guide.py::test_the_regularizer_is_a_loss_of_its_own"),
    ("4.4", "`rt.set_stream_map(…)`", "`runtime.set_stream_map`", "test_traces.py::test_stream_ids_are_those_of_the_map"),
    ("4.4", "`rt.enable_overlap(…)`", "`runtime.enable_overlap`", "test_traces.py::test_only_a_listed_pair_computes_while_a_collective_is_in_flight"),
    ("10.1", "`op.set_router(MoE, fn)`, `meta.apply(cost)`", "`op.set_router`, `op.RouterMeta`", "test_guide.py::test_router_as_printed"),
    ("10.1", "`op.moe(...)` with three dots", "refused, T1503", "test_guide.py::test_three_dots_are_no_arguments"),
    ("10.2", "`rt.register_prefetch(…)`", "`runtime.register_prefetch`, `Session.prefetch_report`", "test_guide.py::test_prefetch_as_printed"),
    ("2.1", "recipes A, B and C", "`graph.recipe`", "test_planning.py::test_a_recipe_has_the_mesh_of_the_guide"),
    ("6", "P, A, K, E, H", "`graph.plan_memory`", "test_planning.py::test_memory_is_counted_per_token"),
]


def render() -> str:
    """Returns the page."""
    stubs = ast.parse((PACKAGE / "python" / "tessera" / "_native.pyi").read_text())
    nodes = {node.name: node for node in stubs.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    lines = [
        "# The Python package",
        "",
        "`from tessera import dist, op, graph, runtime as rt`. The page is made of the package's stubs:",
        "`python crates/tessera-py/tests/reference.py`. [The package's own page](../../crates/tessera-py/README.md) says how to start.",
        "",
        "## What the mapping guide writes",
        "",
        "| section | guide | here | test |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {section} | {guide} | {here} | {test} |" for section, guide, here, test in GUIDE]
    for module in MODULES:
        tree = ast.parse((PACKAGE / "python" / "tessera" / f"{module}.py").read_text())
        lines += ["", f"## `tessera.{module}`", "", ast.get_docstring(tree) or ""]
        for name in exported_names(tree):
            lines += ["", *describe(name, nodes[name])]
    return "\n".join(lines) + "\n"


def exported_names(tree: ast.Module) -> list[str]:
    """Returns the names of ``__all__``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            return [str(element.value) for element in node.value.elts if isinstance(element, ast.Constant)]
    raise ValueError("the module has no __all__")


def describe(name: str, node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Returns the lines about a function or a class with its members."""
    doc = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        return [f"**`{name}{signature(node)}`**", "", *([doc] if doc else [])]
    lines = [f"**class `{name}`**", "", doc, ""]
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and (not member.name.startswith("__") or member.name == "__call__"):
            shown = member.name if is_property(member) else f"{member.name}{signature(member)}"
            first = (ast.get_docstring(member) or "").split("\n")[0]
            lines.append(f"* `{shown}`" + (f": {first}" if first else ""))
    return [line for i, line in enumerate(lines) if line or i + 1 < len(lines)]


def is_property(node: ast.FunctionDef) -> bool:
    """Returns whether a member is a property."""
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


def signature(node: ast.FunctionDef) -> str:
    """Returns the parameters and the result of a function, without ``self``."""
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    result = ast.unparse(node.returns) if node.returns else "None"
    return f"({arguments}) -> {result}"


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"wrote {PAGE}")
