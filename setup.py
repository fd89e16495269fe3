"""Packaging: `pip install -e .[fast,test]` (scripts/setup does it, with the Python that GDB embeds)."""
import re
import runpy
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.develop import develop

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "gdbleak" / "__init__.py").read_text()).group(1)


def compile_agent(directory):
    """Compile what is put into live processes; without a compiler gdbleak lacks only that, and says so when asked."""
    module = runpy.run_path(str(HERE / "gdbleak" / "record" / "compile_agent.py"))
    problem = module["compile_agent"](directory)
    if problem:
        print("gdbleak: the recording agent was not compiled:", problem, file=sys.stderr)


class Build(build_py):
    """An installation: the agent goes beside the package's files."""

    def run(self):
        super().run()
        compile_agent(HERE / "gdbleak" / "record" if getattr(self, "editable_mode", False)
                      else Path(self.build_lib) / "gdbleak" / "record")


class Develop(develop):
    """An editable installation: into the source tree."""

    def run(self):
        super().run()
        compile_agent(HERE / "gdbleak" / "record")


setup(
    name="gdbleak",
    version=VERSION,
    description="Who holds the memory of a process or a core file, through which path, and is it a leak",
    packages=find_packages(include=["gdbleak", "gdbleak.*"]),
    package_data={"gdbleak.record": ["agent.c"]},
    cmdclass={"build_py": Build, "develop": Develop},
    python_requires=">=3.9",
    install_requires=["numpy", "pygdbmi>=0.11", "tabulate", "pyelftools", "capstone>=4"],
    extras_require={"fast": ["numba"], "test": ["pytest", "networkx"]},
    entry_points={"console_scripts": ["gdbleak = gdbleak.cli:main"]},
)
