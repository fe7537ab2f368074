"""Legality: which memory and which exchange a compressor may be combined with."""

from collections.abc import Sequence

from gradwire.base import Compressor, Memory, MultiRound, TwoLevelExchange
from gradwire.errors import ConfigError
from gradwire.spec import (
    ExchangeConfig,
    exchange_classes,
    exchange_of,
    find_exchange,
    format_spec,
    memory_classes,
    name_of,
)


def wants_residual(compressor: Compressor) -> bool:
    """Returns whether a method needs error feedback to converge: biased, and far from the input."""
    traits = compressor.traits()
    if traits.accumulates:
        return True
    return traits.contraction and not traits.unbiased and not traits.suits_small_tensors


def check_memory(compressor: Compressor, memory: Memory) -> None:
    """Raises ConfigError, with what would be legal, if the compressor does not suit the memory."""
    reason = _memory_refusal(compressor, memory)
    if reason is not None:
        others = [
            name
            for name, cls in memory_classes().items()
            if _memory_refusal(compressor, cls(**cls.examples[0])) is None
        ]
        raise ConfigError(
            f"{format_spec(compressor)} does not go with memory {name_of(memory)!r}{reason}"
            f"{_advice('memory', others)}"
        )


def _memory_refusal(compressor: Compressor, memory: Memory) -> str | None:
    traits = compressor.traits()
    if traits.accumulates:
        if memory.separates_residual:
            return None
        return (
            ": it compares a gradient with the residual, which that memory does not keep separate "
            "from it"
        )
    if memory.needs_contraction and not traits.contraction:
        return f", which needs a contraction: {traits.why_not or 'it is none'}"
    return None


def check_exchange(compressor: Compressor, memory: Memory, exchange: ExchangeConfig | str) -> None:
    """Raises ConfigError, with what would be legal, if messages cannot go through the exchange."""
    whole = exchange_of(exchange)
    config = whole.across_nodes
    reason = _exchange_refusal(compressor, memory, config)
    if reason is not None:
        one_level = [
            n for n, c in exchange_classes().items() if not issubclass(c, TwoLevelExchange)
        ]
        others = [
            name
            for name in one_level
            if _exchange_refusal(compressor, memory, ExchangeConfig(name)) is None
        ]
        raise ConfigError(
            f"{format_spec(compressor)} does not go with exchange '{config}': {reason}"
            f"{_advice('exchange' if whole.node is None else 'between', others)}"
        )


def _exchange_refusal(compressor: Compressor, memory: Memory, config: ExchangeConfig) -> str | None:
    reason = find_exchange(config.name).refuses(compressor)
    if reason is None and isinstance(compressor, MultiRound) and config.settings:
        reason = "it defines its own rounds, which do not have this setting"
    if reason is None and config.name == "mean" and loses_sums(compressor, memory):
        reason = f"sums in 16 bits lose what memory {name_of(memory)!r} cannot see"
    return reason


def _advice(noun: str, names: Sequence[str]) -> str:
    """Returns the end of an error text that lists what would be legal."""
    *others, last = [repr(name) for name in names] or [""]
    return f"; use {noun} {', '.join(others)}{' or ' if others else ''}{last}" if last else ""


def loses_sums(compressor: Compressor, memory: Memory) -> bool:
    return memory.needs_contraction and compressor.traits().rounds_sums
