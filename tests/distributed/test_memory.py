"""What the strategies hold beside the shards, on real ranks."""

import pytest
import torch

import cpref
from cpref.measure.peak import PeakMemory

pytestmark = pytest.mark.distributed

LOCAL, HEADS, HEAD_DIM = 128, 4, 16
BLOCK = 2 * HEADS * LOCAL * HEAD_DIM * 4  # bytes of one K,V block


def peak(group, strategy):
    """Bytes that forward and backward make at most, each rank with `LOCAL` tokens."""
    q, k, v = (torch.randn(1, HEADS, LOCAL, HEAD_DIM).requires_grad_() for _ in range(3))
    grad_out = torch.randn_like(q)
    options = {"group": group, "strategy": strategy, "mask": cpref.Full()}
    with PeakMemory() as memory:
        cpref.context_parallel_attention(q, k, v, **options).backward(grad_out)
    return memory.peak_bytes


def test_the_ring_needs_no_more_memory_on_more_ranks(processes):
    """Flat as soon as a block of each kind is made, leaves and arrives at once: from 4 ranks on."""
    two, four, five = (max(processes(ranks)(peak, "ring")) for ranks in (2, 4, 5))
    assert five == four
    assert four - two <= 2 * BLOCK


def test_gathering_holds_all_keys_and_all_their_gradients(processes):
    few, many = (max(processes(ranks)(peak, "all_gather")) for ranks in (2, 5))
    assert many - few >= 3 * 2 * BLOCK  # three more blocks of K,V, and of dK,dV
