"""Large parameters are cut into chunks, each of which is a lane of its own."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.engine.chunks import cut
from gradwire.errors import ConfigError
from gradwire.simulation import Simulation
from gradwire.spec import compressor_classes, format_spec

SHAPE = (120, 64)
CHUNK_BYTES = 16384
"""64 rows of 64 float32 entries."""

SPECS = [
    format_spec(cls(**example))
    for cls in compressor_classes().values()
    for example in cls.examples[:1]
]


def gradients(step: int, ranks: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(SHAPE, generator=generator) for _ in range(ranks)]


def chunked(spec: str, **options: object) -> Simulation:
    """Returns three workers that train one parameter `w` in chunks."""
    settings = {"workers": 3, "chunk_bytes": CHUNK_BYTES, **options}
    return gradwire.simulate({"w": torch.zeros(SHAPE)}, spec, **settings)  # type: ignore[arg-type]


def residuals(sim: Simulation) -> list[Tensor]:
    """Returns the residual of `w` on every worker."""
    return [
        torch.cat([lane.memory_state["residual"] for lane in worker.lanes_of("w")])
        for worker in sim.workers
    ]


@pytest.mark.parametrize("block", [1, 64, 100, 128, 256])
def test_chunks_cover_all_rows_in_whole_blocks(block: int) -> None:
    tensor = torch.zeros(SHAPE)
    chunks = cut("w", tensor, block, CHUNK_BYTES)
    edges = [edge for chunk in chunks for edge in (chunk.start, chunk.stop)]
    assert len(chunks) > 1
    assert [edges[0], *edges[1:-1:2], edges[-1]] == [0, *edges[2::2], SHAPE[0]]
    sizes = [chunk.of(tensor).numel() for chunk in chunks]
    assert all(size % block == 0 for size in sizes[:-1])
    assert all(4 * size <= CHUNK_BYTES for size in sizes)
    assert len({chunk.name for chunk in chunks}) == len(chunks)


def test_small_parameters_and_dense_plans_are_not_cut() -> None:
    assert cut("w", torch.zeros(64, 64), 1, CHUNK_BYTES) == []
    assert cut("w", torch.zeros(1, 10_000), 1, CHUNK_BYTES) == []
    assert chunked("none").workers[0].chunks == {}
    assert chunked("topk:ratio=0.1", chunk_bytes=0).workers[0].chunks == {}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "none"])
def test_a_chunk_is_a_parameter_of_its_own(spec: str) -> None:
    """Whatever a method does, it does to a chunk as to a parameter of that name and shape."""
    sim = chunked(spec)
    chunks = sim.workers[0].chunks["w"]
    apart = gradwire.simulate(
        {chunk.name: chunk.of(torch.zeros(SHAPE)) for chunk in chunks}, spec, workers=3
    )
    for step in range(3):
        grads = gradients(step)
        mean = sim.step([{"w": grad} for grad in grads])["w"]
        means = apart.step([{c.name: c.of(grad) for c in chunks} for grad in grads])
        assert torch.equal(mean, torch.cat([means[c.name] for c in chunks]))
    assert sim.stats()["message_bytes"] == apart.stats()["message_bytes"]
    assert sim.stats()["dense_bytes"] == apart.stats()["dense_bytes"]


@pytest.mark.parametrize("spec", ["int4", "fp8", "dct", "chunktopk:k=2,chunk=16"])
def test_blocks_give_the_same_result_cut_or_not(spec: str) -> None:
    sims = chunked(spec, exchange="gather"), chunked(spec, exchange="gather", chunk_bytes=0)
    for step in range(3):
        one, other = (sim.step([{"w": grad} for grad in gradients(step)])["w"] for sim in sims)
        assert torch.equal(one, other)


def test_a_switch_keeps_residuals_in_other_chunks() -> None:
    sim = chunked("topk:ratio=0.1")
    sim.step([{"w": grad} for grad in gradients(0)])
    before = residuals(sim)
    # Its blocks of 4096 entries are 64 rows, so that the second chunk is shorter than the first.
    for spec, rows in [("chunktopk", [64, 56]), ("topk:ratio=0.05", [60, 60])]:
        sim.switch(spec)
        assert [lane.ctx.shape[0] for lane in sim.workers[0].lanes_of("w")] == rows
        assert all(map(torch.equal, residuals(sim), before))
        assert {lane.ctx.step for lane in sim.workers[0].lanes_of("w")} == {1}


def test_states_resume_bitwise_and_only_with_the_same_chunks() -> None:
    first, second = chunked("topk:ratio=0.1 | qsgd:bits=4"), chunked("topk:ratio=0.1 | qsgd:bits=4")
    first.step([{"w": grad} for grad in gradients(0)])
    second.load_state_dict(first.state_dict())  # type: ignore[arg-type]
    one, other = (sim.step([{"w": grad} for grad in gradients(1)])["w"] for sim in (first, second))
    assert torch.equal(one, other)
    with pytest.raises(ConfigError, match="chunk_bytes is 16384, expected 0"):
        chunked("topk:ratio=0.1 | qsgd:bits=4", chunk_bytes=0).load_state_dict(first.state_dict())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "chunk_bytes", "text"),
    [
        ("topk:ratio=0.1", 255, "chunk_bytes must be at least 256 for parameter 'w' of shape"),
        ("int4", 511, "at least 512 .* whole rows and whole blocks of 128 entries; got 511"),
        ("powersgd:rank=4", 512, r"of shape \(2, 64\), would not become shorter; got 512"),
        ("topk:ratio=0.1", -1, "chunk_bytes must be"),
    ],
)
def test_sizes_that_the_method_does_not_allow(spec: str, chunk_bytes: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        chunked(spec, chunk_bytes=chunk_bytes)
