"""A training job divided among GPUs in four ways at once, and what one GPU then holds.

    TP  tensor parallelism: each matrix in TP parts; ranks exchange activations in every layer
    CP  context parallelism: each sequence in CP shards; ranks exchange K,V in every attention
    PP  pipeline parallelism: the layers in PP stages; stages wait for each other (the bubble)
    DP  data parallelism: the sequences of the batch in DP parts; gradients are added up

The ranks of TP are neighbours, then those of CP, PP, DP, so that TP stays within a node:

    GPU          0  1  2  3  4  5  6  7        TP = 2, CP = 2, DP = 2
    TP with      1  0  3  2  5  4  7  6
    CP with      2  3  0  1  6  7  4  5
    DP with      4  5  6  7  0  1  2  3

Parameters are in bfloat16, gradients and the optimizer's state (a copy of the parameters and two
moments) in float32. The state is sharded over the DP·CP ranks; with `shard_all` so are parameters
and gradients, which then travel in every micro-batch. Layers may be recomputed in backward: then
each keeps its input alone. The loss is computed from LOSS_CHUNK tokens at a time.

Everything is modelled, nothing is measured. Left out: what the allocator, NCCL and CUDA take
(`hardware.Achieved.memory` keeps room for them) and what a kernel holds while it runs.

Sources: Korthikanti et al. 2022 (arXiv 2205.05198), section 4, for activations sharded over TP and
for what an interleaved pipeline keeps; Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, for
the 1F1B pipeline; Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), for the sharding of states.
"""

import math
from dataclasses import dataclass

from .cost import Shape
from .hardware import Achieved, Gpu, Network
from .shapes import ModelShape

LOSS_CHUNK = 2048  # tokens
ACTIVATION = PARAMETER = 2  # bytes of each number
GRADIENT, OPTIMIZER = 4, 12


@dataclass(frozen=True)
class Request:
    """What is asked for. batch: sequences of a step; fp8: matrix products in float8."""

    model: ModelShape
    seq_len: int
    gpus: int
    gpu: Gpu
    network: Network
    batch: int
    achieved: Achieved
    fp8: bool = False

    @property
    def room(self) -> float:
        """Bytes of a GPU that the job may fill."""
        return self.achieved.memory * self.gpu.memory

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.seq_len


@dataclass(frozen=True)
class Division:
    """The four degrees. row: ranks of a row under hybrid; micro: sequences that a DP rank computes
    at once; interleave: runs of layers that a stage of the pipeline holds."""

    cp: int
    tp: int
    pp: int
    dp: int
    strategy: str = "ring"
    row: int = 1
    micro: int = 1
    interleave: int = 1
    recompute: bool = False
    shard_all: bool = False

    @property
    def gpus(self) -> int:
        return self.cp * self.tp * self.pp * self.dp

    @property
    def in_use(self) -> int:
        """How many of the four are used at all."""
        return sum(degree > 1 for degree in (self.cp, self.tp, self.pp, self.dp))

    def micro_batches(self, request: Request) -> int:
        """Of a DP rank in a step."""
        return request.batch // self.dp // self.micro

    def layers(self, request: Request) -> int:
        """Of the largest stage."""
        return -(-request.model.layers // self.pp)

    def tokens(self, request: Request) -> int:
        """That a rank computes at once: L of each sequence of the micro-batch."""
        return self.micro * -(-request.seq_len // self.cp)

    def attention(self, request: Request) -> Shape:
        """One attention of a TP part, as padded to what zigzag shares evenly."""
        model, unit = request.model, 2 * self.cp
        return Shape(
            self.micro,
            -(-request.seq_len // unit) * unit,
            model.heads // self.tp,
            model.kv_heads // self.tp,
            model.head_dim,
            self.cp,
            ACTIVATION,
            neighbours=self.row,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that holds most.

    gathered: parameters and gradients of whole layers while they are in use, with shard_all;
    activations: saved for backward; buffers: what the attention, the loss or a layer's backward
    needs for a while.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def memory(request: Request, way: Division) -> Memory:
    """What a GPU of the first stage holds, for that keeps most micro-batches for backward."""
    parameters, sharers = stage_parameters(request, way), way.dp * way.cp
    whole = sharers if way.shard_all else 1
    return Memory(
        parameters=PARAMETER * parameters / whole,
        gradients=GRADIENT * parameters / whole,
        optimizer=OPTIMIZER * parameters / sharers,
        gathered=_gathered(request, way) if whole > 1 else 0.0,
        activations=_activations(request, way),
        buffers=_buffers(request, way),
    )


def stage_parameters(request: Request, way: Division) -> float:
    """Of a TP part of the first stage: with the embedding, and with the head if it is the only."""
    model = request.model
    ends = model.vocab * model.dim * (2 if way.pp == 1 else 1)
    return (way.layers(request) * model.layer_parameters + ends) / way.tp


def _gathered(request: Request, way: Division) -> float:
    """One layer in use and the next on its way, and the gradients of one that are leaving."""
    model = request.model
    largest = max(model.layer_parameters, model.vocab * model.dim) / way.tp
    return largest * (2 * PARAMETER + GRADIENT)


def _activations(request: Request, way: Division) -> float:
    tokens, layers = way.tokens(request), way.layers(request)
    saved = saved_by_layer(request.model) * tokens / way.tp
    kept = ACTIVATION * request.model.dim * tokens / way.tp if way.recompute else saved
    more = (way.pp - 1) / way.interleave if way.interleave > 1 else 0.0
    in_flight = min(way.pp + more, way.micro_batches(request))
    return kept * layers * in_flight + (saved if way.recompute else 0.0)


def saved_by_layer(model: ModelShape) -> int:
    """Bytes for each token: two inputs, each before and after its norm; q, k, v, out, lse; gate and
    up, and what goes into the last product.

    So much is kept where a norm and SwiGLU are one kernel each. `cpref.model`, which has them in
    pieces, keeps 3 dim + ffn_dim numbers more.
    """
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return ACTIVATION * (4 * model.dim + 2 * q + 2 * kv + 3 * model.ffn_dim) + 4 * model.heads


def _buffers(request: Request, way: Division) -> float:
    """The largest of three, which are not alive at the same time."""
    model, tokens = request.model, way.tokens(request)
    layer = tokens * ACTIVATION * (4 * model.dim + 2 * model.ffn_dim) / way.tp
    loss = min(LOSS_CHUNK, tokens) * model.vocab * (2 * 4 + ACTIVATION) / way.tp
    return max(layer, loss, _attention_buffers(way.attention(request), way))


def _attention_buffers(shape: Shape, way: Division) -> float:
    """At the peak of backward: sums of the gradients in float32, and what the strategy holds of
    other ranks."""
    sums = shape.sum_bytes * (shape.q + shape.kv)
    if way.cp == 1:
        return sums
    wire, summed = shape.bytes_each, shape.sum_bytes
    in_row = {"ulysses": way.cp, "hybrid": way.row}.get(way.strategy, 1)
    kv = shape.kv * (in_row // math.gcd(shape.kv_heads, in_row))
    ring = kv * (2 * wire + 3 * summed)  # in use and arriving; gradients in use, leaving, arriving
    exchanged = (2 * shape.q + kv) * wire
    return (
        sums
        + {
            "ring": ring,
            "all_gather": way.cp * kv * (wire + summed),
            "reduce_scatter": way.cp * shape.q * (2 * wire + summed),
            "ulysses": exchanged,
            "hybrid": exchanged + ring,
        }[way.strategy]
    )
