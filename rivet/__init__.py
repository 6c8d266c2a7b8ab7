"""Rivet: collaboration with strong LLM experts, turned into the capability of one compact model.

`from rivet import Solver` (or `AsyncSolver`) answers problems with a checkpoint. Importing this
package imports no torch: submodules that need it are imported where they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rivet.async_solver import AsyncSolver
    from rivet.solver import Solver

__version__ = "0.1.0"
__all__ = ["AsyncSolver", "Solver", "__version__"]

_PLACES = {"AsyncSolver": "rivet.async_solver", "Solver": "rivet.solver"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
