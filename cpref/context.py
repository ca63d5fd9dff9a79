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

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from types import FunctionType

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .attention import context_parallel_attention
from .buffers import Buffers
from .comm import Group, GroupLike, resolve
from .layout import place, shard, unshard
from .mask import Causal, Full


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
    intercept = _Intercept(mesh, group, strategy, layout, lengths, Buffers(buffers, parts))
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


class _Intercept(TorchFunctionMode):
    """Turns `F.scaled_dot_product_attention` into the sharded one. Modes belong to their thread."""

    def __init__(
        self,
        mesh: GroupLike,
        group: Group,
        strategy: str,
        layout: str,
        lengths: set[int],
        buffers: Buffers,
    ):
        super().__init__()
        self.buffers = buffers
        self._group, self._layout, self._lengths = group, layout, lengths
        self._attention = partial(
            context_parallel_attention, group=mesh, strategy=strategy, layout=layout
        )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _ATTENTION:
            return self._sharded(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            return self._multihead(*args, **(kwargs or {}))
        if func in _LOCAL:
            raise NotImplementedError(
                f"{func.__name__} would attend within this rank's shard only; under "
                "context_parallel call F.scaled_dot_product_attention, or "
                "cpref.context_parallel_attention with a mask"
            )
        return self.buffers.call(func, args, kwargs or {})

    def _multihead(self, *args, **kwargs) -> tuple[Tensor, None]:
        """F.multi_head_attention_forward, which nn.MultiheadAttention and nn.Transformer* call."""
        given = signature(F.multi_head_attention_forward).bind(*args, **kwargs)
        given.apply_defaults()
        for name, wanted, remedy in _MULTIHEAD:
            value = given.arguments[name]
            if value is not wanted:
                shown = "a tensor" if isinstance(value, Tensor) else value
                raise NotImplementedError(
                    f"{name} is {shown}; under context_parallel it must be {wanted}: {remedy}"
                )
        return _inside_multihead(self._sharded)(*given.args)

    def _sharded(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise NotImplementedError(
                "attn_mask is a tensor of one rank's shard and cannot speak of the others' keys; "
                "call cpref.context_parallel_attention(mask=...) with Documents, SlidingWindow or "
                "a function of global positions"
            )
        if dropout_p:
            raise NotImplementedError(
                f"dropout_p is {dropout_p}; dropout of attention weights is not supported under "
                "context_parallel: use 0, or dropout on the output"
            )
        if not enable_gqa and query.dim() == 4 and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True"
            )
        mask = Causal() if is_causal else Full()
        seq_len = self._global_length(query)
        kv_seq_len = self._global_length(key)
        return self._attention(
            query, key, value, mask=mask, scale=scale, seq_len=seq_len, kv_seq_len=kv_seq_len
        )

    def _global_length(self, x: Tensor) -> int:
        """The length of a buffer of which x may be this rank's shard, else P times its own."""
        local, ranks, rank = x.shape[-2], self._group.size, self._group.rank
        fitting = {n for n in self._lengths if place(n, ranks, self._layout).length(rank) == local}
        return fitting.pop() if len(fitting) == 1 else local * ranks


# Attention that this rank would compute of its own shard alone, and that is not rewritten here.
_LOCAL = {
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
    torch.ops.higher_order.flex_attention,
}
_ATTENTION = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_MULTIHEAD = (  # arguments of F.multi_head_attention_forward: what they must be, and what to do
    ("need_weights", False, "the weights of all keys are on no rank; pass need_weights=False"),
    ("key_padding_mask", None, "leave out padding, or mask its tokens in the loss"),
    ("bias_k", None, "each rank would add a key; use add_bias_kv=False"),
    ("bias_v", None, "each rank would add a value; use add_bias_kv=False"),
    ("add_zero_attn", False, "each rank would add a key; use add_zero_attn=False"),
    ("static_k", None, "pass key"),
    ("static_v", None, "pass value"),
)


def _inside_multihead(attention: Callable[..., Tensor]) -> Callable:
    """F.multi_head_attention_forward with `attention` in place of scaled_dot_product_attention.

    why: while a mode handles a call, the calls within are not shown to it. So the function is made
    again, of the same code, with another meaning of two of the names that it looks up.
    """
    function = F.multi_head_attention_forward
    names = {
        **function.__globals__,
        "has_torch_function": lambda _: False,
        "scaled_dot_product_attention": attention,
    }
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


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


def _contexts() -> list[_Intercept]:
    """The contexts that surround us now, the outermost first."""
    modes = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in modes if isinstance(mode, _Intercept)]


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
