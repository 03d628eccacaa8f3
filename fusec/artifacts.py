"""Built kernels, choices and outcomes of passes in ``torch.compiler.save_cache_artifacts()``: for other machines."""

import logging
import re

from fusec.cache import Cache, open_cache
from fusec.config import Config
from fusec.frontend.torch_internals import carried_by_torch

logger = logging.getLogger(__name__)
NAME = re.compile(r"([0-9a-f]{64})(\.so|\.config|\.passes)")
"""The name of a valid entry: a key and a suffix. Anything else might be a path."""


def export(cache: Cache, key: str, suffix: str) -> None:
    """Hand an entry to torch, digest and all."""
    entry = cache.entry(key, suffix)
    if entry is not None:
        _hand_over(key + suffix, entry)


def take(name: str, entry: bytes) -> None:
    """Store an artifact from torch in the cache that the environment names, if it is a valid entry."""
    found = NAME.fullmatch(name)
    try:
        if found is not None and open_cache(Config.from_environment()).admit(found[1], found[2], entry):
            return
        reason = "it is damaged"
    except OSError as error:
        reason = str(error)
    logger.warning("the artifact %r is ignored, and will be built where it is needed: %s", name, reason)


_hand_over = carried_by_torch("fusec", take)
