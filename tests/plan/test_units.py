from fullshard.plan.units import contains, lowest_common_unit


def test_the_innermost_common_unit_is_chosen() -> None:
    units = ["", "decoder", "decoder.embed", "encoder"]
    assert lowest_common_unit(["decoder.embed", "decoder.head"], units) == "decoder"
    assert lowest_common_unit(["decoder.embed", "encoder.embed"], units) == ""
    assert lowest_common_unit(["decoder.embed"], units) == "decoder.embed"


def test_the_root_is_chosen_over_nothing_but_not_over_a_top_level_unit() -> None:
    assert lowest_common_unit(["a.x", "a.y"], ["", "a"]) == "a"


def test_a_name_that_only_begins_alike_does_not_contain() -> None:
    assert contains("layers.1", "layers.1.mlp")
    assert not contains("layers.1", "layers.10")
    assert contains("", "anything")
