"""The graph of LuaJIT objects: what gdbleak finds in a core is what the debug library found in the process."""
import json

import pytest

from tests import luajit_target
from tests.luajit_target import FIXTURES, PACKAGED, debug_name, offsets
from tests.targets import run_gdb

#: Kinds all of whose references the debug library can see. A prototype's chunk name, the temporaries of a
#: coroutine, what a trace refers to: these it cannot.
SEEN_WHOLE = {"table", "function", "upvalue", "userdata", "string", "cdata"}


def told(name, path):
    """The lines of enumerate.lua as (objects: address -> kind, edges: set of (address, address))."""
    headers = dict(zip(("userdata", "cdata"), offsets(debug_name(name), "GCudata", "GCcdata")))
    objects, edges = {}, set()
    for line in path.read_text().splitlines():
        words = line.split()
        addresses = []
        for kind, address in zip(words[::2], words[1::2]):
            kind = {"proto": "prototype"}.get(kind, kind)
            addresses.append(int(address, 16) - headers.get(kind, 0))
            objects[addresses[-1]] = kind
        if len(addresses) == 2:
            edges.add(tuple(addresses))
    return objects, edges


@pytest.mark.parametrize("name", [*PACKAGED, "debian-gc32", "openresty-sysmalloc"])
def test_every_object_and_reference(tmp_path, monkeypatch, name):
    captured = luajit_target.run_program(name, "enumerate.lua", tmp_path, "counts", "edges")
    monkeypatch.setenv("GRAPH_FILE", str(tmp_path / "graph.json"))
    done = run_gdb([f"source {FIXTURES / 'graph_in_gdb.py'}"], captured.exe, captured.core)
    assert (tmp_path / "graph.json").exists(), done.stdout
    found = json.loads((tmp_path / "graph.json").read_text())
    kinds = {address: kind for address, kind in found["objects"]}
    ours = {(found["objects"][source][0], found["objects"][target][0]) for source, target in found["edges"]}

    objects, edges = told(name, tmp_path / "edges")
    empty = captured.truth["empty"]
    objects.pop(empty)
    edges = {edge for edge in edges if empty not in edge}
    assert len(edges) > 700 and set(objects.values()) >= {*SEEN_WHOLE, "thread", "prototype"}
    assert {address: kinds.get(address) for address in objects} == objects
    lost = {(objects[source], hex(source), objects[target], hex(target)) for source, target in edges - ours}
    assert not lost
    extra = {(source, target) for source, target in ours - edges if objects.get(source) in SEEN_WHOLE}
    assert not {(objects[source], hex(source), kinds[target], hex(target)) for source, target in extra}
