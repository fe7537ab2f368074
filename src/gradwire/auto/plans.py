"""Plans of candidates: the memory that goes with a method, and the exchange that suits a link."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradwire.auto.calibration import link_load
from gradwire.auto.candidates import (
    BITS16,
    FP32,
    LOW_RANK,
    QUANTIZERS,
    SELECTIVE,
    Candidate,
    Choice,
)
from gradwire.auto.groups import Group
from gradwire.base import Compressor, Memory
from gradwire.comm.cost_model import LinkModel
from gradwire.engine.legality import check_exchange, check_memory, wants_residual
from gradwire.engine.make_plan import choose_exchange
from gradwire.engine.plan import Method, Plan, PolicyMethod
from gradwire.policies import Policy
from gradwire.spec import POLICY_DEFAULT, exchange_of, format_spec, memory_of, parse


@dataclass(frozen=True)
class Plans:
    """Makes the candidates of one model and number of ranks.

    Settings of the integration, such as the size of chunks, are those of its `first` plan.
    """

    first: Plan
    tensors: Sequence[Tensor]
    groups: tuple[Group, ...]
    size: int
    adaptive: bool
    """True if methods must suit an optimiser that divides entries by running magnitudes. What
    arrives late arrives at once, in the magnitude too, so sparsifiers and signs of gradients stall
    training under it."""

    def singles(self, link: LinkModel) -> list[Candidate]:
        """Returns the candidates with one method for all parameters."""
        selective = () if self.adaptive else SELECTIVE
        specs = (FP32, BITS16, *QUANTIZERS, *LOW_RANK, *selective)
        return [self.of_choice((self._pair(spec, self.tensors, link),)) for spec in specs]

    def mixed(self, specs: Sequence[str], link: LinkModel) -> Candidate:
        """Returns the candidate with these methods of the groups."""
        pairs = zip(specs, self.groups, strict=True)
        choice = tuple(self._pair(spec, group.tensors, link) for spec, group in pairs)
        return self.of_choice(choice)

    def renewed(self, option: Candidate, link: LinkModel) -> Candidate:
        """Returns the candidate with the exchanges for another link."""
        specs = [spec for spec, _ in option.choice]
        if option.is_mixed:
            return self.mixed(specs, link)
        return self.of_choice((self._pair(specs[0], self.tensors, link),))

    def _pair(self, spec: str, tensors: Iterable[Tensor], link: LinkModel) -> tuple[str, str]:
        compressor = parse(spec)
        exchange = choose_exchange(compressor, _memory(compressor), tensors, self.size, link)
        return format_spec(compressor), str(exchange)

    def of_choice(self, choice: Choice) -> Candidate:
        """Returns the candidate of a choice; raises ConfigError if there can be none."""
        methods = [_method(spec, exchange) for spec, exchange in choice]
        plans = tuple(self.first.with_method(method) for method in methods)
        if len(methods) == 1:
            return Candidate(choice, plans[0], plans)
        entries = [
            PolicyMethod(Policy(pattern, method.compressor), method, names)
            for group, method in zip(self.groups[:-1], methods[:-1], strict=True)
            for pattern, names in group.matches()
        ]
        default = Policy(POLICY_DEFAULT, methods[-1].compressor)
        entries.append(PolicyMethod(default, methods[-1], self.groups[-1].names))
        return Candidate(choice, replace(plans[-1], policies=tuple(entries)), plans)

    def link_loads(self, option: Candidate) -> list[tuple[float, float]]:
        """Returns hops and bytes of a step of each group."""
        plans = option.plans if option.is_mixed else option.plans * len(self.groups)
        pairs = zip(plans, self.groups, strict=True)
        return [link_load(plan, group.tensors, self.size) for plan, group in pairs]


def choice_of(saved: object) -> Choice:
    """Reads a choice of a saved state; raises ValueError if it is none."""
    pairs = saved if isinstance(saved, list) else []
    if not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"no choice {saved!r}")
    return tuple((str(spec), str(exchange)) for spec, exchange in pairs)


def _method(spec: str, exchange: str) -> Method:
    """Returns a method with the memory that goes with it; raises ConfigError if it is illegal."""
    compressor, config = parse(spec), exchange_of(exchange)
    memory = _memory(compressor)
    check_memory(compressor, memory)
    check_exchange(compressor, memory, config)
    return Method(compressor, memory, config)


def _memory(compressor: Compressor) -> Memory:
    return memory_of("residual" if wants_residual(compressor) else "none")
