"""How long a training step takes on GPUs among which it is divided: modelled, part by part.

A micro-batch passes the PP stages forward and backward; while a stage waits for the first and for
the last of them it is idle, PP - 1 times in all (1F1B):

    stage 0   F0 F1 F2 .. .. B0 .. B1 .. B2        3 micro-batches, 2 stages, B twice as long as F
    stage 1   .. F0 B0 .. F1 B1 .. F2 B2 ..

Where a stage holds several runs of layers (interleaved), it is idle so many times less, for so many
times the messages.

In a stage, products of matrices run at a part of the GPU's peak, attention as `times` models it
under the strategy. TP exchanges activations four times in each direction of a layer, and is waited
for. Parameters and gradients of DP travel layer by layer while a micro-batch is computed; what
takes longer is waited for. A collective is a message to each of the other ranks, as a ring of them
needs; the trees of large clusters need fewer.

Left out: norms, embeddings, the optimizer's step, the data, kernels that are slower on few tokens,
and what goes wrong. So times are rather too short, and more so for small pieces.

Sources: those of `division`.
"""

from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from .cost import Sent, Shape, backward_flops, forward_flops
from .division import ACTIVATION, GRADIENT, PARAMETER, Division, Request, stage_parameters
from .hardware import attention_machine
from .times import Machine, Pass, backward_pass, forward_pass
from .work import causal_zigzag


@dataclass(frozen=True)
class Time:
    """Seconds of a training step, for each thing that a GPU does or waits for.

    products, attention: computing, forward and backward; recompute: forward again; context, tensor,
    data: waits for what the three exchange; pipeline: waits for the other stages.
    """

    products: float
    attention: float
    recompute: float
    context: float
    tensor: float
    pipeline: float
    data: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Attention:
    """Seconds of one layer's attention of one micro-batch, computing and waiting, and what the rank
    that sends most sends for it, forward and backward."""

    forward: float
    backward: float
    forward_wait: float = 0.0
    backward_wait: float = 0.0
    sent: Sent = field(default_factory=lambda: Sent(0, 0))


def time(request: Request, way: Division, attention: Attention | None = None) -> Time:
    """Of a step on the whole batch. attention: None means as the strategy takes it."""
    model, layers = request.model, way.layers(request)
    attention = attention or attention_of(request, way)
    tokens, micro_batches = way.tokens(request), way.micro_batches(request)
    layer = _seconds(request, tokens * (model.layer_parameters - 2 * model.dim) / way.tp)
    head = _seconds(request, tokens * model.vocab * model.dim / way.tp)
    # why: the stage with the head gets fewer layers, so the longest stage is at least the mean
    products = max(layers * layer, (model.layers * layer + head) / way.pp)

    again = layers * (layer + attention.forward) if way.recompute else 0.0
    runs = 2 if way.recompute else 1
    context = layers * (runs * attention.forward_wait + attention.backward_wait)
    tensor = layers * _tensor_seconds(request, way, tokens) * (runs + 1)
    attending = layers * (attention.forward + attention.backward)
    stage = 3 * products + attending + again + context + tensor
    hop = 0.0
    if way.pp > 1:
        link = request.network.link(way.tp * way.cp * way.pp)
        hop = 2 * link.seconds(tokens * model.dim * ACTIVATION / way.tp)
    forward = products + layers * attention.forward
    return Time(
        products=micro_batches * 3 * products,
        attention=micro_batches * attending,
        recompute=micro_batches * again,
        context=micro_batches * context,
        tensor=micro_batches * tensor,
        pipeline=(way.pp - 1) * (stage / way.interleave + hop)
        + micro_batches * way.interleave * hop,
        data=_data_seconds(request, way, forward, stage - forward - context - tensor),
    )


def least_time(request: Request, way: Division) -> Time:
    """The same if attention had not to wait: found a hundred times as fast, and never more."""
    shape = way.attention(request)
    pairs = shape.seq_len * (shape.seq_len + 1) // 2 / way.cp
    peak, achieved = request.gpu.flops, request.achieved
    forward = forward_flops(shape, pairs) / (achieved.attention_forward * peak)
    backward = backward_flops(shape, pairs) / (achieved.attention_backward * peak)
    return time(request, way, Attention(forward, backward))


def attention_of(request: Request, way: Division) -> Attention:
    """One layer's attention of one micro-batch, causal and dealt out in zigzag."""
    network = request.network
    link, row = network.link(way.tp * way.cp), network.link(way.tp * way.row)
    machine = attention_machine(request.gpu, link, request.achieved)
    return _attention(way.strategy, way.attention(request), replace(machine, row=row))


@cache
def _attention(strategy: str, shape: Shape, machine: Machine) -> Attention:
    joined = {"ulysses": shape.ranks, "hybrid": shape.neighbours}.get(strategy, 1)
    # why: a row under zigzag holds an early and a late run of tokens, as one rank would
    work = _work(shape.seq_len, shape.ranks // joined)
    forward: Pass = forward_pass(strategy, shape, work, machine)
    backward: Pass = backward_pass(strategy, shape, work, machine)
    return Attention(
        forward.compute,
        backward.compute,
        forward.exposed,
        backward.exposed,
        forward.sent + backward.sent,
    )


_work = lru_cache(maxsize=16)(causal_zigzag)


def model_flops(request: Request, *, full: bool = False) -> float:
    """Of a step, as they are usually counted: backward as twice forward, nothing recomputed.

    full: count all pairs of the attention, as some do, although half of them are masked.
    """
    model, seq_len = request.model, request.seq_len
    products = model.layers * (model.layer_parameters - 2 * model.dim) + model.vocab * model.dim
    shape = Shape(1, seq_len, model.heads, model.kv_heads, model.head_dim, 1, ACTIVATION)
    pairs = seq_len * seq_len if full else seq_len * (seq_len + 1) // 2
    forward = 2 * products * seq_len + model.layers * forward_flops(shape, pairs)
    return 3.0 * request.batch * forward


def _seconds(request: Request, numbers: float) -> float:
    """Of so many multiply-adds in products of matrices."""
    flops = request.gpu.fp8_flops if request.fp8 else request.gpu.flops
    return 2 * numbers / (request.achieved.matmul * flops)


def _tensor_seconds(request: Request, way: Division, tokens: int) -> float:
    """Two all-gathers and two reduce-scatters of a layer's activations, in one direction."""
    others = way.tp - 1
    if not others:
        return 0.0
    size = tokens * request.model.dim * ACTIVATION / way.tp
    return 4 * request.network.link(way.tp).seconds(size * others, others)


def _data_seconds(request: Request, way: Division, forward: float, backward: float) -> float:
    """What the travel of parameters and gradients takes longer than a micro-batch's computing.

    Parameters are gathered before forward and gradients are summed after backward, once in a step;
    with shard_all in every micro-batch, and the parameters again for backward.
    """
    ranks = way.dp * way.cp
    if ranks == 1:
        return 0.0
    spread = way.gpus if way.dp > 1 else way.tp * way.cp
    part = stage_parameters(request, way) * (ranks - 1) / ranks
    link, messages = request.network.link(spread), way.layers(request) * (ranks - 1)
    gather = link.seconds(part * PARAMETER, messages)
    scatter = link.seconds(part * GRADIENT, messages)
    if way.shard_all:
        waits = max(0.0, gather - forward) + max(0.0, gather + scatter - backward)
        return way.micro_batches(request) * waits
    return max(0.0, gather - forward) + max(0.0, scatter - backward)
