"""Every synonym: other spellings of arithmetic, views, matrix products and whole meanings."""

from bench.respelling import SYNONYMS
from bench.synonyms import arithmetic, meanings, products, views

__all__ = ["SYNONYMS", "arithmetic", "meanings", "products", "views"]
