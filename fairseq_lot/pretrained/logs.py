"""Control of other packages' log messages."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(name: str, level: int = logging.ERROR) -> Iterator[None]:
    """Context manager: drop the log messages of the logger ``name`` that are below a level."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
