"""What the ranks of the adviser's test do."""

import small_model
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic


def advised(specs: list[str]) -> tuple[str, bool]:
    """The advice as text, and whether the model is as it was."""
    ddp = DDP(small_model.model())
    before = [p.detach().clone() for p in ddp.parameters()]
    advice = laconic.advise(ddp, lambda model: small_model.loss(model, 0), specs=specs)
    pairs = zip(before, ddp.parameters(), strict=True)
    return str(advice), all(torch.equal(a, b) and b.grad is None for a, b in pairs)
