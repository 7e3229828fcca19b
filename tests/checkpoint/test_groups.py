"""The groups of an optimizer, as several ranks have them, in one."""

from mgpu.checkpoint.publish import merged


def group(rate, *names):
    return {"parameters": list(names), "built": {"lr": rate}, "changed": {}}


def test_groups_of_the_same_settings_are_joined_whatever_rank_has_which():
    """Rank 1 has no scalar, rank 2 a group of its own."""
    ranks = [
        {"groups": [group(0.1, "a", "b"), group(0.1, "scale"), group(0.2, "bias")]},
        {"groups": [group(0.1, "a", "c"), group(0.2, "bias")]},
        {"groups": [group(0.1, "scale"), group(0.3, "z")]},
    ]
    expected = [group(0.1, "a", "b", "c"), group(0.1, "scale"), group(0.2, "bias"), group(0.3, "z")]
    assert merged(ranks)["groups"] == expected
    assert ranks[0]["groups"][0]["parameters"] == ["a", "b"]
