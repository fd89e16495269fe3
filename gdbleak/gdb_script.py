"""What GDB sources: it defines the leak-* commands, or says in one line what is missing.

Written so that the oldest Python a GDB may embed can parse it: it has to be able to say that it is too old.
"""
import sys

import gdb


def load_gdbleak(script):
    """Import the package that `script` lies in, afresh when sourced again, and let it register commands."""
    if sys.version_info < (3, 9):
        return "this GDB has Python %d.%d, and 3.9 or newer is needed: use a newer GDB" % sys.version_info[:2]
    try:
        import importlib.util
        import os

        for name in [name for name in sys.modules if name.partition(".")[0] == "gdbleak"]:
            del sys.modules[name]
        # Not through sys.path: the packages beside an installed gdbleak may be for another Python than GDB's.
        package = os.path.dirname(os.path.realpath(script))
        spec = importlib.util.spec_from_file_location("gdbleak", os.path.join(package, "__init__.py"),
                                                      submodule_search_locations=[package])
        sys.modules["gdbleak"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["gdbleak"])

        from gdbleak import environment

        problem = environment.prepare()
        if not problem:
            import gdbleak.commands

            gdbleak.commands.register()
            # Void until here: so a driver of GDB can tell whether there are commands.
            gdb.set_convenience_variable("_gdbleak_status", 0)
        return problem
    except KeyboardInterrupt:
        return "interrupted while loading; source the script again"
    except Exception as error:
        return "cannot be loaded: %s: %s" % (type(error).__name__, " ".join(str(error).split()))


if __name__ == "__main__":
    gdbleak_problem = load_gdbleak(__file__)
    if gdbleak_problem:
        gdb.write("gdbleak: %s\n" % gdbleak_problem, gdb.STDERR)
    del gdbleak_problem, load_gdbleak
