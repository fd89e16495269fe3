"""leak-gc --types: tables by the code that makes such, on a program that knows how many each of its lines made."""
import json
import lzma

import pytest

from tests import luajit_target, nginx_target
from tests.targets import ROOT, Capture, ask, table
from tests.test_gc import QUICK


@pytest.fixture(scope="module")
def makers(tmp_path_factory):
    """Function of a build: (what makers.lua told, place -> number of tables)."""
    made = {}

    def get(name):
        if name not in made:
            captured = luajit_target.run_program(name, "makers.lua", tmp_path_factory.mktemp(name), "counts")
            (reply,), = ask([(captured, ["leak-gc --types --top 1000"])])
            assert "Traceback" not in reply.text
            header, *rows = table(reply.items, "tables by the code")
            made[name] = captured.truth, {(place, names): int(count) for place, names, count, _ in rows}
        return made[name]
    return get


@pytest.mark.parametrize("name", QUICK)
def test_tables_by_the_line_that_made_them(makers, name):
    truth, found = makers(name)
    counts = {place: count for (place, _), count in found.items() if place != "not known"}
    assert len(truth["made"]) == 8
    assert {line: counts.get(f"makers.lua:{line}") for line, _ in truth["made"]} == dict(truth["made"])


@pytest.mark.parametrize("name", QUICK)
def test_tables_that_a_function_fills(makers, name):
    """Made without a name, and named only when they have been through a call."""
    truth, found = makers(name)
    (line, number), = truth["by functions"]
    assert found[f"function makers.lua:{line}", "{first_field, second_field, third_field}"] == number
    (line, number), = truth["filled by"]
    assert found[f"filled by function makers.lua:{line}", "{height_of_it, weight_of_it}"] == number


@pytest.mark.parametrize("name", QUICK)
def test_maps_are_from_nowhere(makers, name):
    """What names a map has tells nothing; the standard library's own tables, which C makes, are not claimed either."""
    truth, found = makers(name)
    assert truth["nowhere"] <= found["not known", "(more than 16 names)"] < truth["nowhere"] + 10
    assert any(place == "not known" and "arshift, band" in names for place, names in found)


def test_in_nginx(tmp_path):
    """The worker's core that ships: the constructor whose tables the cache keeps, one a hit."""
    truth = json.loads((ROOT / "fixtures" / "cores" / "luajit-cache.truth.json").read_text())
    packed = ROOT / "fixtures" / "cores" / "luajit-cache.core.xz"
    (tmp_path / "core").write_bytes(lzma.decompress(packed.read_bytes()))
    (reply,) = nginx_target.ask(["leak-gc --types --top 1000"], Capture(tmp_path / "core", None, truth, [], tmp_path))
    source = (luajit_target.FIXTURES / "nginx" / "dynamic_cache.lua").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if text.endswith("= {"))
    header, *rows = table(reply.items, "tables by the code")
    counts = {place: int(count) for place, names, count, _ in rows if names == "{cert, expires, key}"}
    # What it made before anything was counted may not be collected yet.
    assert list(counts) == [f"dynamic_cache.lua:{line}"]
    assert truth["hits"] <= counts[f"dynamic_cache.lua:{line}"] <= truth["hits"] + 8
