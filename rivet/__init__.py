"""Rivet: collaboration with strong LLM experts, turned into the capability of one compact model.

Importing this package imports no torch: submodules that need it are imported where they are used.
"""

__version__ = "0.1.0"
