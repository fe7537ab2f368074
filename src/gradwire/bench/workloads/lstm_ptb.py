"""A two-layer LSTM on Penn Treebank: the large model of Zaremba et al. 2014."""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.bench.datasets.text import PTB, Words, read_words, synthetic_words
from gradwire.bench.workloads._lstm import LstmWorkload


@dataclass(frozen=True)
class LstmPtb(LstmWorkload):
    """1500 units a layer, 10,000 words; 66 million parameters."""

    hidden: int = 1500
    source: ClassVar = PTB.source
    tiny: ClassVar = "synthetic=true,hidden=16,vocabulary=50,batch_size=8,words=8,dropout=0.1"

    @property
    def title(self) -> str:
        return "LSTM on Penn Treebank"

    def text(self) -> Words:
        if self.synthetic:
            return synthetic_words(self.vocabulary, self.device)
        return read_words(PTB, self.data, self.device)
