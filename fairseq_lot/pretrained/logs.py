"""What other packages log while models and data are read."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(name: str, level: int = logging.ERROR) -> Iterator[None]:
    """Leave out what a package logs below a level."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
