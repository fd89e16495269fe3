"""``source scripts/gdbleak.py`` in GDB defines the leak-* commands (the code is in gdbleak/gdb_script.py)."""
import os

script = os.path.join(os.path.dirname(os.path.realpath(__file__)), os.pardir, "gdbleak", "gdb_script.py")
exec(compile(open(script).read(), script, "exec"), {"__name__": "__main__", "__file__": script})
del script
