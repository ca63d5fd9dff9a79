"""context_parallel: a script written for PyTorch's own, with one import changed.

    from cpref import context_parallel          # was: torch.distributed.tensor.experimental

    with context_parallel(mesh, buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        loss = model(tokens, labels)            # its scaled_dot_product_attention is sharded
        loss.backward()

On entry the buffers are replaced by this rank's shards, on exit they are what they were before. In
between, and in this thread only, `F.scaled_dot_product_attention` is `context_parallel_attention`.

A backward needs no context: what it has to do was settled in forward. Activation checkpointing runs
forward again in backward, perhaps after the context has ended; so what is checkpointed inside takes
the context along, its buffers' shards too.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps

import torch
import torch.utils.checkpoint
from torch import Tensor

from .buffers import Buffers
from .comm import GroupLike, resolve
from .intercept import Intercept
from .layout import shard, unshard


@contextmanager
def context_parallel(
    mesh: GroupLike,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    strategy: str = "ring",
    layout: str = "zigzag",
) -> Iterator[None]:
    """Shard `buffers` and the attention of everything that runs inside.

    mesh: what `context_parallel_attention` takes as group: a one-dimensional DeviceMesh and the
    rest. buffers: whole tensors, the same on every rank, such as tokens, labels, positions, rotary
    tables; buffer_seq_dims: the sequence dimension of each. They are replaced in place by this
    rank's shard, and restored on exit, also after an exception; those among `no_restore_buffers`
    stay sharded. strategy, layout: as in `context_parallel_attention`.

    Any length works, divisible by the ranks or not. Inside, is_causal, scale and enable_gqa of
    `F.scaled_dot_product_attention` are honoured; q, k, v are this rank's shards. It does not
    matter how the function was imported, and nn.MultiheadAttention and nn.TransformerEncoder, which
    call it, are sharded too (with need_weights=False). Not seen, and so left within the shard: what
    TorchScript runs, and kernels that are called past this function, such as those of flash_attn.

    A backward may run after the context, and finds the shards of buffers that autograd kept. Only
    an autograd.Function that keeps a buffer itself gets an error then: give it buffer.clone().

    Raises ValueError if buffers and buffer_seq_dims do not fit each other, if a buffer requires
    grad (use `cpref.shard`, which is differentiable), or if a buffer that is not to be restored is
    none of the buffers. Inside, an attn_mask, dropout, flex_attention, or what else cannot be
    sharded so raises NotImplementedError.

    Source of the interface: `torch.distributed.tensor.experimental.context_parallel`.
    """
    group = resolve(mesh)
    buffers, dims = list(buffers or []), list(buffer_seq_dims or [])
    kept = list(no_restore_buffers or [])
    _require_buffers(buffers, dims, kept)
    parts = [
        shard(buffer.data, dim, group=group, layout=layout)
        for buffer, dim in zip(buffers, dims, strict=True)
    ]
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    intercept = Intercept(mesh, group, strategy, layout, lengths, Buffers(buffers, parts))
    _install_checkpoint_hook()
    with intercept.buffers.sharded(kept), intercept:
        yield


@torch.no_grad()
def context_parallel_unshard(
    mesh: GroupLike, buffers: Sequence[Tensor], seq_dims: Sequence[int], *, layout: str = "zigzag"
) -> list[Tensor]:
    """The whole tensors, on every rank, of buffers that are sharded: the outputs of a context.

    buffers: this rank's shards; seq_dims: the sequence dimension of each; layout: that of the
    context. Returns new tensors, without grad. The global length is the sum of the local ones.
    Raises ValueError if buffers and seq_dims do not fit each other, or shards and layout.
    """
    group = resolve(mesh)
    buffers, dims = list(buffers), list(seq_dims)
    _require_buffers(buffers, dims, [], name_of_dims="seq_dims")
    whole = []
    for buffer, dim in zip(buffers, dims, strict=True):
        lengths = group.all_gather(torch.tensor([buffer.shape[dim]], device=buffer.device)).wait()
        total = int(sum(lengths))
        whole.append(unshard(buffer, dim, group=group, layout=layout, seq_len=total))
    return whole


def _require_buffers(
    buffers: list[Tensor],
    dims: list[int],
    kept: list[Tensor],
    *,
    name_of_dims: str = "buffer_seq_dims",
) -> None:
    if len(buffers) != len(dims):
        raise ValueError(
            f"there are {len(buffers)} buffers and {len(dims)} {name_of_dims}; "
            "each buffer needs the dimension of its sequence"
        )
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(buffer, Tensor):
            raise TypeError(f"buffers[{index}] is {type(buffer).__name__}; it must be a tensor")
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(
                f"{name_of_dims}[{index}] is {dim}, but buffers[{index}] has {buffer.dim()} dims"
            )
        if buffer.requires_grad and name_of_dims == "buffer_seq_dims":
            raise ValueError(
                f"buffers[{index}] requires grad, and would be replaced in place; shard it with "
                "cpref.shard, which is differentiable, inside the context"
            )
    for one in kept:
        if not any(one is buffer for buffer in buffers):
            raise ValueError("no_restore_buffers has a tensor that is not among buffers")


def _contexts() -> list[Intercept]:
    """The contexts that surround us now, the outermost first."""
    modes = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in modes if isinstance(mode, Intercept)]


def _taking_along(function):
    """`function`, which whenever it runs does so in the contexts that surround us now."""
    contexts = _contexts()
    if not contexts:
        return function

    @wraps(function)
    def inside(*args, **kwargs):
        if _contexts() == contexts:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context.buffers.sharded())
                stack.enter_context(context)
            return function(*args, **kwargs)

    return inside


def _stand_ins(args: tuple) -> tuple:
    """What a checkpoint is to keep instead of buffers, which are whole again when it needs them."""
    for context in _contexts():
        args = context.buffers.stand_ins(args)
    return args


def _install_checkpoint_hook() -> None:
    """Let `torch.utils.checkpoint` take the context along; without a context it is unchanged.

    why: a checkpointed function is called again in backward, by torch, and there is no public way
    to be told of it. The two places through which `checkpoint` goes are wrapped, once and for good.
    """
    module = torch.utils.checkpoint
    if hasattr(module, "_cpref_hook"):
        return
    generator, function_class = (
        module._checkpoint_without_reentrant_generator,
        module.CheckpointFunction,
    )

    @wraps(generator)
    def without_reentrant(fn, *args, **kwargs):
        return generator(_taking_along(fn), *_stand_ins(args), **kwargs)

    class Reentrant(function_class):
        @classmethod
        def apply(cls, fn, *args):
            return function_class.apply(_taking_along(fn), *_stand_ins(args))

    module._checkpoint_without_reentrant_generator = without_reentrant
    module.CheckpointFunction = Reentrant
    module._cpref_hook = True
