"""Map a model onto a rack of GPUs, prove that its ranks cannot hang or drift, and run it in lockstep.

>>> from tessera import dist, op, graph, runtime as rt

``dist`` distributes arrays over a mesh, ``op`` has layers that are called on them, ``graph`` makes a program of a function
and proves its plan, and ``runtime`` runs the plan on threads or processes.
"""

from . import dist, errors, graph, op, runtime
from ._native import __version__
from .errors import TesseraError

__all__ = ["TesseraError", "__version__", "dist", "errors", "graph", "op", "runtime"]
