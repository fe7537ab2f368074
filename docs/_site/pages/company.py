"""What a method goes with: its traits, and the memories and exchanges that they allow."""

from gradwire.base import Compressor, TwoLevelExchange
from gradwire.catalogue import Row
from gradwire.engine.plan import check_exchange, check_memory, make_plan
from gradwire.errors import ConfigError
from gradwire.spec import exchange_classes, memory_classes, parse_memory
from pages.markdown import code, listed, table

TRAITS = (
    ("unbiased", "its expectation is the input"),
    ("contraction", "closer to the input than zero is, so error feedback converges"),
    ("summable", "an all-reduce can add its messages up"),
)
"""What decides which memory and exchange a method may go with."""

RARE = (
    ("votes", "the majority counts, not the mean"),
    ("accumulates", "it says an entry once enough has piled up"),
    ("everywhere", "used for small and one-dimensional tensors, too"),
    ("waits", "on a GPU the host waits for it"),
)


def company(codec: Compressor, row: Row) -> str:
    """Its traits, and which memories and exchanges take it."""
    traits = codec.traits()
    lines = [(name, "yes" if getattr(traits, name) else "no", why) for name, why in TRAITS]
    lines.append(
        ("fixed length", "no" if traits.variable_length else "yes", "known before it is said")
    )
    lines += [(name, "yes", why) for name, why in RARE if getattr(traits, name)]
    refused = [] if traits.contraction else [traits.why_not]
    exchanges = [name for name in exchange_classes() if takes_exchange(codec, name)]
    said = [
        table(("trait", "", "meaning"), lines, words=3),
        f"- **Memories:** {listed(map(code, legal_memories(codec)))}; {code(row.memory)} "
        "unless told otherwise.",
        f"- **Exchanges:** {listed(map(code, exchanges))}; `auto` takes {code(row.exchange)} "
        "for 8 workers.",
        *(f"- No contraction: {why}." for why in refused if why),
    ]
    return said[0] + "\n\n" + "\n".join(said[1:])


def legal_memories(codec: Compressor) -> list[str]:
    """The memories that the method may go with."""
    found = []
    for name in memory_classes():
        try:
            check_memory(codec, parse_memory(name))
        except ConfigError:
            continue
        found.append(name)
    return found


def takes_exchange(codec: Compressor, name: str) -> bool:
    """Whether the method may go with an exchange beside its usual memory."""
    if issubclass(exchange_classes()[name], TwoLevelExchange):
        return True
    memory = make_plan(codec, None, "auto", (), 8).memory
    try:
        check_exchange(codec, memory, name)
    except ConfigError:
        return False
    return True
