"""The shared folding module: a profile of weighted stacks, and its readers and writers.

It knows nothing of the rest of the project and needs nothing but Python.
"""
from .folded import read_folded
from .profile import Node, Profile
from .writers import ENDINGS, check_path, write

__all__ = ["ENDINGS", "Node", "Profile", "check_path", "read_folded", "write"]
