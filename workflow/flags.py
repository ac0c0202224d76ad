"""Settings of a config file as words of a command line."""

from typing import Any


def words(flags: dict[str, Any]) -> list[str]:
    """Flags as words of a command line; ``true`` is the flag alone."""
    return [
        f"--{name}" if value is True else f"--{name}={'false' if value is False else value}"
        for name, value in flags.items()
    ]


def attention_words(system: dict[str, Any]) -> list[str]:
    """The flags of a system's mechanism, the same for swap and fairseq-train."""
    sites = {"attention-sites": system["sites"]} if "sites" in system else {}
    return words({"attention": system["attention"], **sites, **system.get("options", {})})
