"""Packaging: `pip install -e .[fast,test]` (scripts/setup does it, with the Python that GDB embeds)."""
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "gdbleak" / "__init__.py").read_text()).group(1)

setup(
    name="gdbleak",
    version=VERSION,
    description="Who holds the memory of a process or a core file, through which path, and is it a leak",
    packages=find_packages(include=["gdbleak", "gdbleak.*"]),
    python_requires=">=3.9",
    install_requires=["numpy", "pygdbmi>=0.11", "tabulate", "pyelftools"],
    extras_require={"fast": ["numba"], "test": ["pytest", "networkx"]},
    entry_points={"console_scripts": ["gdbleak = gdbleak.cli:main"]},
)
