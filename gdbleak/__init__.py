"""gdbleak: who holds the memory of a process or core file, through which path, and whether it is a leak."""

__version__ = "0.1.0"
