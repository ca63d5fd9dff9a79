"""Groups of real ranks: fresh ones, several at once, parts of the world, and device meshes."""

import gc
import os
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import cpref
from cpref.comm import as_grid, resolve

from ..sharded import draw, judged, sharded, with_changing_documents
from ..test_attention import Layer, tokens, trained

pytestmark = pytest.mark.distributed


def same(computed, exact):
    for x, exactly in zip(computed, exact, strict=True):
        torch.testing.assert_close(x, exactly, rtol=1e-12, atol=1e-13)


def first_is_a_ring_step(group):
    fresh = resolve(dist.new_group(list(range(group.size))))
    return fresh.shift(torch.tensor([float(group.rank)])).wait().item()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_first_operation_of_a_fresh_group_may_be_a_ring_step(processes, ranks):
    came = processes(ranks)(first_is_a_ring_step)
    assert came == [(rank - 1) % ranks for rank in range(ranks)]


def attention_of_my_ring(group, strategy):
    """Two rings of two ranks, of even and of odd ranks, each with a sequence of its own."""
    rings = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, other = rings[group.rank % 2], rings[1 - group.rank % 2]
    results = sharded(mine, *draw(seq_len=11, seed=group.rank % 2), strategy=strategy)
    try:
        resolve(other)
    except ValueError as error:
        return results, str(error)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "reduce_scatter", "ulysses"])
def test_two_rings_in_one_world_and_the_one_that_a_rank_is_not_in(processes, strategy):
    outcomes = processes(4)(attention_of_my_ring, strategy)
    for rank, (results, said) in enumerate(outcomes):
        same(results, judged(*draw(seq_len=11, seed=rank % 2)))
        assert said == f"group: rank {rank} of the world is not in it"


def attention_of_my_column(group):
    """Data parallel over the first dimension of the mesh, context parallel over the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return sharded(mesh["cp"], *draw(seq_len=9, seed=mesh.get_local_rank("dp")))


def test_one_dimension_of_a_mesh_is_a_group(processes):
    for rank, results in enumerate(processes(4)(attention_of_my_column)):
        same(results, judged(*draw(seq_len=9, seed=rank // 2)))


def attention_over_a_flat_mesh(group, strategy):
    return sharded(init_device_mesh("cpu", (group.size,)), *draw(seq_len=9), strategy=strategy)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_a_mesh_of_one_dimension_is_a_group(processes, strategy):
    exact = judged(*draw(seq_len=9))
    for results in processes(3)(attention_over_a_flat_mesh, strategy):
        same(results, exact)


def attention_over_a_table(group, shape, strategy, layout, seq_len):
    mesh = init_device_mesh("cpu", shape)
    tensors = draw(seq_len=seq_len, heads=8, kv_heads=2)
    return sharded(mesh, *tensors, strategy=strategy, layout=layout)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("seq_len", [3, 37])
def test_hybrid_over_any_table_of_ranks(processes, shape, layout, seq_len):
    exact = judged(*draw(seq_len=seq_len, heads=8, kv_heads=2))
    for results in processes(4)(attention_over_a_table, shape, "hybrid", layout, seq_len):
        same(results, exact)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=str)
def test_hybrid_over_eight_ranks(processes, shape):
    exact = judged(*draw(seq_len=50, heads=8, kv_heads=2))
    for results in processes(8)(attention_over_a_table, shape, "hybrid", "zigzag", 50):
        same(results, exact)


def test_other_strategies_take_all_ranks_of_a_table(processes):
    exact = judged(*draw(seq_len=37, heads=8, kv_heads=2))
    for results in processes(4)(attention_over_a_table, (2, 2), "ring", "zigzag", 37):
        same(results, exact)


def attention_over_a_part_of_the_world(group):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 4]])
    if group.rank == 3:
        try:
            resolve(mesh)
        except ValueError as error:
            dist.new_group([0, 2])
            return str(error)
    results = sharded(mesh, *draw(seq_len=13), strategy="hybrid")
    dist.new_group([0, 2])  # a later group of the whole world still comes about
    return results


def test_a_table_may_be_of_some_of_the_ranks(processes):
    outcomes = processes(5)(attention_over_a_part_of_the_world)
    assert outcomes.pop(3) == "group: rank 3 of the world is not in it"
    exact = judged(*draw(seq_len=13))
    for results in outcomes:
        same(results, exact)


def attention_of_my_table(group, seq_len):
    """Data parallel over the first of three dimensions, a table of the other two."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ring", "ulysses"))
    tensors = draw(seq_len=seq_len, seed=mesh.get_local_rank("dp"))
    return sharded(mesh["ring", "ulysses"], *tensors, strategy="hybrid")


def test_a_table_may_be_a_part_of_a_larger_mesh(processes):
    for rank, results in enumerate(processes(8)(attention_of_my_table, 19)):
        same(results, judged(*draw(seq_len=19, seed=rank // 4)))


def refused(group, ranks):
    mesh = DeviceMesh("cpu", ranks)
    try:
        resolve(mesh)
    except ValueError as error:
        return str(error)


def test_a_table_in_an_order_that_groups_would_not_keep_is_refused(processes):
    for said in processes(4)(refused, [[0, 3], [1, 2]]):
        assert "mesh of the ranks [[0, 3], [1, 2]]; they must increase, row after row" in said


def refused_mesh(group):
    try:
        resolve(init_device_mesh("cpu", (2, 2, 1)))
    except ValueError as error:
        return str(error)


def test_a_mesh_of_three_dimensions_is_refused(processes):
    for said in processes(4)(refused_mesh):
        assert "group is a mesh of 3 dimensions; it must have one, or two for 'hybrid'" in said


def trained_under_fsdp(group):
    """Whole gradients of two layers, their parameters sharded over the ranks of the sequence."""
    mesh = init_device_mesh("cpu", (group.size,))
    layers = nn.Sequential(*(Layer("ring", seed) for seed in range(2)))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    hidden = cpref.shard(tokens(), 1, group=mesh)
    for layer in layers:
        hidden = layer(hidden, group)
    hidden.square().sum().backward()
    # why: FSDP averages what ranks have, and here they have parts of one sum
    return [p.grad.full_tensor() * group.size for p in layers.parameters()]


@pytest.mark.parametrize("ranks", [2, 4])
def test_fully_sharded_parameters_over_the_same_mesh(processes, ranks):
    exact = trained(None, "ring", lambda layer, x, group: layer(x, group))[1:]
    for grads in processes(ranks)(trained_under_fsdp):
        same(grads, exact)


def held(group, rounds):
    """Memory in MiB, threads and open files of this rank after so many ring steps."""
    q, k, v, grad_out = draw(torch.float32, seq_len=16 * group.size)
    for _ in range(rounds):
        block = torch.zeros(50_000)
        group.shift(block).wait()
    sharded(group, q, k, v, grad_out)
    gc.collect()
    me = psutil.Process()
    return me.memory_info().rss / 2**20, me.num_threads(), me.num_fds()


def test_a_thousand_ring_steps_leak_nothing(processes):
    """A step that kept its block of 0.2 MB alive would hold 200 MB more afterwards."""
    before = processes(3)(held, 50)
    after = processes(3)(held, 1000)
    for (memory, threads, files), (more_memory, more_threads, more_files) in zip(
        before, after, strict=True
    ):
        assert more_memory - memory < 20
        assert more_threads <= threads
        assert more_files <= files


def held_after(group, first, calls):
    """Objects, threads and open files of this rank after so many attentions."""
    with_changing_documents(group, first, calls)
    gc.collect()
    me = psutil.Process()
    return len(gc.get_objects()), me.num_threads(), me.num_fds()


def test_hundreds_of_attentions_with_other_documents_leak_nothing(processes):
    """An object that stayed for each call would be 400 more."""
    before = processes(3)(held_after, 0, 400)  # 3 plans each: fills what is remembered of masks
    after = processes(3)(held_after, 400, 400)
    for earlier, later in zip(before, after, strict=True):
        assert later[0] - earlier[0] < 200
        assert later[1] <= earlier[1] and later[2] <= earlier[2]


WORLD_OF_ONE = """
import torch, cpref
device = cpref.init()
assert device == cpref.init()
q = torch.randn(1, 2, 8, 4)
out = cpref.context_parallel_attention(q, q, q)
exact = cpref.reference_attention(q, q, q, mask=cpref.Causal())
assert torch.allclose(out.double(), exact, atol=1e-6)
cpref.shutdown()
cpref.shutdown()
print("done")
"""


def test_without_torchrun_a_process_is_a_world_of_one():
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", WORLD_OF_ONE],
        env={**environment, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "done\n", done.stderr
    assert done.stderr == ""


def timeouts(group):
    """In seconds: of the group of all ranks, of one that is made later, and of those of meshes."""
    line, table = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [[0], [1]])
    groups = [group._group, dist.new_group([0, 1]), line.get_group()]
    groups += [table.get_group(0), table.get_group(1)]
    options = [one._get_backend(torch.device("cpu")).options for one in groups]
    return [one._timeout.total_seconds() for one in options]


def test_the_timeout_of_init_is_that_of_all_moves(processes):
    assert processes(2)(timeouts) == [[60.0] * 5] * 2


def over_two_equal_meshes(group):
    """The second is equal to the first, and its groups are others."""
    results = []
    for _ in range(2):
        mesh = DeviceMesh("cpu", [[0], [1]])
        grid = as_grid(mesh)
        results.append(grid.ring.is_of(mesh.get_group(0)) and as_grid(mesh) is grid)
    return results


def test_a_mesh_that_is_equal_to_another_moves_over_its_own_groups(processes):
    assert processes(2)(over_two_equal_meshes) == [[True, True]] * 2
