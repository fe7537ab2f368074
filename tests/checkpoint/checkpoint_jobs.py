"""Jobs of the ranks in tests of checkpoint files."""

from pathlib import Path

import torch.distributed as dist

from gradwire import Checkpoints


def resume_job(folder: str) -> tuple[int, object, list[int]]:
    rank = dist.get_rank()
    files = Checkpoints(folder, rank, dist.get_world_size(), keep=3)
    for step in (20, 30, 40):
        if (rank, step) == (3, 40):
            continue
        path = files.save(step, {"step": step})
        if (rank, step) == (2, 30):
            path.write_bytes(path.read_bytes()[:-1])
    found = files.resume()
    assert found is not None
    return found.step, found.state["step"], [int(p.name[4:13]) for p in own_files(folder, rank)]


def fresh_job(folder: str) -> tuple[object, list[Path]]:
    rank = dist.get_rank()
    files = Checkpoints(folder, rank, dist.get_world_size())
    if rank != 0:
        files.save(10, {"step": 10})
    return files.resume(), own_files(folder, rank)


def own_files(folder: str, rank: int) -> list[Path]:
    return sorted(Path(folder).glob(f"step*-rank{rank}of4-*.pt"))
