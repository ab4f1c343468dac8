"""A tool of one's own: rows of a table by their words."""

import json

import pytest

from rpg_jax.environments.tools import make_tool

TOOL = "examples.table_search:Search"


def test_the_search_finds_the_rarest_words_first(tmp_path):
    rows = [{"title": "Rhine", "text": "a river"}, {"title": "Rhone", "text": "a river in France"}, "the Seine"]
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    tool = make_tool(TOOL, {"file": str(tmp_path / "table.jsonl"), "top": 2})
    assert tool.name == "Search" and tool.description["function"]["parameters"]["required"] == ["query"]
    found = tool.call({"query": "river FRANCE"}).splitlines()
    assert [json.loads(row)["title"] for row in found] == ["Rhone", "Rhine"]
    assert tool.call({"query": "Danube"}) == "nothing found" and tool.call({"query": "seine"}) == "the Seine"
    with pytest.raises(ValueError, match="cannot read file="):
        make_tool(TOOL, {"file": str(tmp_path / "no.jsonl")})
