"""cpref: context parallelism, complete and small enough to read.

One long sequence sharded over several devices, with exact attention across them. Start reading at
`layout.py`, then `tiles.py`, `merge.py`, `comm.py` and `strategies/ring.py`.
"""

from .attention import context_parallel_attention
from .classroom.rank import keep
from .comm import Grid, Group, Traffic
from .context import context_parallel, context_parallel_unshard
from .decode import ShardedCache, generate
from .faults import RankError
from .layout import local_positions, shard, unshard
from .local import LocalError, run_local
from .mask import Causal, Documents, Full, Mask, MaskMod, SlidingWindow
from .processes import init, shutdown
from .reference import reference_attention

__version__ = "0.1.0"

__all__ = [
    "Causal",
    "Documents",
    "Full",
    "Grid",
    "Group",
    "LocalError",
    "Mask",
    "MaskMod",
    "RankError",
    "ShardedCache",
    "SlidingWindow",
    "Traffic",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_unshard",
    "generate",
    "init",
    "keep",
    "load_ipython_extension",
    "local_positions",
    "reference_attention",
    "run_local",
    "shard",
    "shutdown",
    "unshard",
]


def load_ipython_extension(ipython) -> None:
    """`%load_ext cpref`: the magics `%%torchrun` and `%grade`."""
    from .classroom import grade_magic, torchrun

    torchrun.load_ipython_extension(ipython)
    grade_magic.load_ipython_extension(ipython)
