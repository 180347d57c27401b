from fullshard.plan.units import contains, lowest_common_unit
from tests.counting import calls_of


def test_the_innermost_common_unit_is_chosen() -> None:
    units = ["", "decoder", "decoder.embed", "encoder"]
    assert lowest_common_unit(["decoder.embed", "decoder.head"], units) == "decoder"
    assert lowest_common_unit(["decoder.embed", "encoder.embed"], units) == ""
    assert lowest_common_unit(["decoder.embed"], units) == "decoder.embed"


def test_the_root_is_chosen_over_nothing_but_not_over_a_top_level_unit() -> None:
    assert lowest_common_unit(["a.x", "a.y"], ["", "a"]) == "a"


def test_there_may_be_no_unit_that_contains_all() -> None:
    assert lowest_common_unit(["a.x", "b.x"], ["a", "b"]) is None
    assert lowest_common_unit(["a.x", "a"], ["a", "b"]) == "a"
    assert lowest_common_unit(["a.x", "a.y"], []) is None


def test_units_are_not_searched_but_looked_up() -> None:
    users = ["experts.7.up", "experts.8.up"]
    few, many = ({"", *(f"experts.{n}" for n in range(count))} for count in (10, 10_000))
    calls = [
        calls_of(lambda units=units: lowest_common_unit(users, units)) for units in (few, many)
    ]
    assert calls[0] == calls[1]


def test_a_name_that_only_begins_alike_does_not_contain() -> None:
    assert contains("layers.1", "layers.1.mlp")
    assert not contains("layers.1", "layers.10")
    assert contains("", "anything")
