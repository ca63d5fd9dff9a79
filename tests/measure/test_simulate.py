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
TRAINING = Training(SMALL, seq_len=1024, ranks=4, at_once=64)


def really(group, training):
    copies, shards = (1, group.size) if training.sharded else (group.size, 1)
    mesh = dist.init_device_mesh("cpu", (copies, shards), mesh_dim_names=("copies", "shards"))
    return step_memory(training, group, mesh)


# every pair of two choices; the full product takes minutes
KINDS = {
    f"{strategy}-{'recompute' if recompute else 'keep'}-{'fsdp' if sharded else 'copies'}": replace(
        TRAINING,
        strategy=strategy,
        recompute=recompute,
        sharded=sharded,
        dtype="bf16" if sharded else "fp32",
    )
    for strategy, recompute, sharded in (
        ("ring", True, True),
        ("ring", False, False),
        ("all_gather", True, False),
        ("all_gather", False, True),
    )
}


@pytest.fixture(scope="module")
def simulated():
    """Every kind of training that is compared with real ranks, from one simulation."""
    usages = simulate(*KINDS.values())
    return dict(zip(KINDS, zip(KINDS.values(), usages, strict=True), strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_real_ranks_hold_what_is_simulated(processes, simulated, kind):
    training, usage = simulated[kind]
    real = asdict(processes(4)(really, training)[0])
    for name, size in asdict(usage).items():
        assert size == pytest.approx(real[name], rel=0.05), name


def test_parameters_and_their_company_are_those_of_the_model(simulated):
    """float32 parameters, gradients, two moments: divided among the ranks, or not."""
    for training, usage in simulated.values():
        own = SMALL.parameters * 4 / (training.ranks if training.sharded else 1)
        assert usage.parameters == usage.gradients == own
        assert usage.optimizer == pytest.approx(2 * own, rel=1e-3)
