"""Every synonym: other spellings of arithmetic, views, matrix products and whole meanings."""

from tests.campaigns.respelling import SYNONYMS
from tests.campaigns.synonyms import arithmetic, meanings, products, views

OPENING = (
    *(one.name for one in SYNONYMS.values() if one.write.__module__ == meanings.__name__),
    "power-as-product",
    "flatten-as-concatenation",
)
"""Those that spell out a whole meaning, and so make places for the others."""


def with_places(name: str) -> list[str]:
    """A synonym, with those that make places for it."""
    return list(dict.fromkeys([name, *OPENING]))


__all__ = ["OPENING", "SYNONYMS", "arithmetic", "products", "views", "with_places"]
