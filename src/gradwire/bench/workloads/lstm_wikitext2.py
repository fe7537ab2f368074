"""A two-layer LSTM on WikiText-2 (Merity et al. 2016)."""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.bench.datasets.text import WIKITEXT2, Words, read_words, synthetic_words
from gradwire.bench.workloads._lstm import LstmWorkload


@dataclass(frozen=True)
class LstmWikitext2(LstmWorkload):
    """650 units a layer, 33,278 words; 50 million parameters, most of them embeddings."""

    vocabulary: int = WIKITEXT2.vocabulary
    source: ClassVar = WIKITEXT2.source
    tiny: ClassVar = "synthetic=true,hidden=16,vocabulary=50,batch_size=8,words=8,dropout=0.1"

    @property
    def title(self) -> str:
        return "LSTM on WikiText-2"

    def text(self) -> Words:
        if self.synthetic:
            return synthetic_words(self.vocabulary, self.device)
        return read_words(WIKITEXT2, self.data, self.device)
