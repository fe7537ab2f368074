"""Compatibility of a method: its traits, and the memories and exchanges that they allow."""

from gradwire.base import Compressor, TwoLevelExchange
from gradwire.catalogue import Row
from gradwire.engine.legality import check_exchange, check_memory
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.spec import exchange_classes, memory_classes, parse_exchange, parse_memory
from pages.markdown import code, listed, table

TRAITS = (
    ("unbiased", "its expectation is the input"),
    ("contraction", "closer to the input than zero is, so error feedback converges"),
    ("summable", "an all-reduce can add its messages up"),
)
"""The traits that decide which memories and exchanges a method can be used with."""

RARE = (
    ("is_vote", "votes", "the majority counts, not the mean"),
    ("accumulates", "accumulates", "an entry is sent once enough of it has accumulated"),
    ("suits_small_tensors", "small tensors", "used for small and one-dimensional tensors, too"),
    ("syncs_host", "syncs the host", "on a GPU the host waits for it"),
)


def compatibility(codec: Compressor, row: Row) -> str:
    """Returns a method's traits, and the memories and exchanges that accept it."""
    traits = codec.traits()
    lines = [(name, "yes" if getattr(traits, name) else "no", why) for name, why in TRAITS]
    lines.append(
        ("fixed length", "no" if traits.variable_length else "yes", "known before encoding")
    )
    lines += [(title, "yes", why) for name, title, why in RARE if getattr(traits, name)]
    refused = [] if traits.contraction else [traits.why_not]
    exchanges = [name for name in exchange_classes() if takes_exchange(codec, name)]
    paragraphs = [
        table(("trait", "", "meaning"), lines, words=3),
        f"- **Memories:** {listed(map(code, legal_memories(codec)))}; {code(row.memory)} "
        "is the default.",
        f"- **Exchanges:** {listed(map(code, exchanges))}; `auto` takes {code(row.exchange)} "
        "for 8 workers.",
        *(f"- No contraction: {why}." for why in refused if why),
    ]
    return paragraphs[0] + "\n\n" + "\n".join(paragraphs[1:])


def legal_memories(codec: Compressor) -> list[str]:
    """Returns the memories that the method can be used with."""
    found = []
    for name in memory_classes():
        try:
            check_memory(codec, parse_memory(name))
        except ConfigError:
            continue
        found.append(name)
    return found


def takes_exchange(codec: Compressor, name: str) -> bool:
    """Returns whether the method can be used with an exchange and its usual memory."""
    if issubclass(exchange_classes()[name], TwoLevelExchange):
        return True
    memory = make_plan(codec, None, "auto", (), 8).memory
    try:
        check_exchange(codec, memory, parse_exchange(name))
    except ConfigError:
        return False
    return True
