"""The simulation against real ranks that do the same, and against a count by hand."""

from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

from cpref.measure.shapes import ModelShape
from cpref.measure.simulate import Training, simulate, step_memory

pytestmark = pytest.mark.slow

SMALL = ModelShape(
    "small", layers=3, dim=256, heads=4, kv_heads=2, head_dim=64, ffn_dim=688, vocab=1024
)
TRAINING = Training(SMALL, seq_len=4096, ranks=4, at_once=256)


def really(group, training):
    copies, shards = (1, group.size) if training.sharded else (group.size, 1)
    mesh = dist.init_device_mesh("cpu", (copies, shards), mesh_dim_names=("copies", "shards"))
    return step_memory(training, group, mesh)


@pytest.fixture(scope="module")
def simulated():
    """Every kind of training that is compared with real ranks, from one simulation."""
    trainings = {
        (strategy, recompute, sharded): replace(
            TRAINING,
            strategy=strategy,
            recompute=recompute,
            sharded=sharded,
            dtype="bf16" if sharded else "fp32",
        )
        for strategy in ("ring", "all_gather")
        for recompute in (True, False)
        for sharded in (True, False)
    }
    return {
        key: (training, usage)
        for (key, training), usage in zip(
            trainings.items(), simulate(*trainings.values()), strict=True
        )
    }


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "recompute", "sharded"),
    [  # every pair of two; the full product takes minutes
        pytest.param("ring", True, True, id="ring-recompute-fsdp"),
        pytest.param("ring", False, False, id="ring-keep-copies"),
        pytest.param("all_gather", True, False, id="all_gather-recompute-copies"),
        pytest.param("all_gather", False, True, id="all_gather-keep-fsdp"),
    ],
)
def test_real_ranks_hold_what_is_simulated(processes, simulated, strategy, recompute, sharded):
    training, usage = simulated[strategy, recompute, sharded]
    real = asdict(processes(4)(really, training)[0])
    for name, size in asdict(usage).items():
        assert size == pytest.approx(real[name], rel=0.05), name


def test_parameters_and_their_company_are_those_of_the_model(simulated):
    """float32 parameters, gradients, two moments: divided among the ranks, or not."""
    for (_, _, sharded), (training, usage) in simulated.items():
        own = SMALL.parameters * 4 / (training.ranks if sharded else 1)
        assert usage.parameters == usage.gradients == own
        assert usage.optimizer == pytest.approx(2 * own, rel=1e-3)
