"""The roofline of a ring step: whether the kernel limits it, or the link."""

import numpy as np

from ..measure.hardware import ACHIEVED, gpu_named, network_named
from .picture import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILLION, Picture, blank

_STYLES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (VERMILLION, "D"), (PURPLE, "v"))


def roofline(
    gpu: str = "h100-80gb",
    heads: int = 32,
    kv_heads: int = 8,
    bytes_each: int = 2,
    links: tuple[str, ...] = ("nvlink4", "pcie5", "infiniband-ndr"),
) -> Picture:
    """Modelled: FLOP/s that a whole tile reaches against L, if its block travels meanwhile.

    A step computes 4·B·H·L²·D FLOPs and receives 2·B·Hkv·L·D·e bytes: 2·H·L / (e·Hkv) FLOPs for
    each byte. So a link of W bytes per second feeds 2·H·L·W / (e·Hkv) FLOP/s, and no more than the
    kernel's own. gpu, links: names of `measure.hardware`, with what it assumes to be achieved.
    Raises ValueError for an unknown name. Source of the form: Williams et al. 2009, Roofline
    (doi 10.1145/1498765.1498785), with the link in the place of the memory.
    """
    device = gpu_named(gpu)
    roof = ACHIEVED.attention_forward * device.flops
    kv_heads = min(kv_heads, heads)
    tokens = np.geomspace(64, 65536, 60)
    per_byte = 2 * heads * tokens / (bytes_each * kv_heads)
    figure, axes = blank(7.2, 3.2)
    axes.set(xscale="log", yscale="log")
    axes.minorticks_off()
    knees = {}
    for name, (color, marker) in zip(links, _STYLES, strict=False):
        bandwidth = network_named(name, device).inside.bandwidth
        reached = np.minimum(roof, per_byte * bandwidth)
        knees[name] = roof * bytes_each * kv_heads / (2 * heads * bandwidth)
        axes.plot(tokens, reached / 1e12, color=color, linewidth=2, label=name)
        axes.plot(knees[name], roof / 1e12, color=color, marker=marker, linestyle="none")
    axes.axhline(roof / 1e12, color=BLACK, linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xlim(tokens[0], tokens[-1])
    ends = [64, 256, 1024, 4096, 16384, 65536]
    axes.set_xticks(ends, [f"{n:,}" for n in ends])
    axes.set_xlabel("tokens of a block, L")
    axes.set_ylabel("TFLOP/s of a step (modelled)")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="lower right", title=f"{gpu}, {heads} heads, {kv_heads} K,V heads")
    said = ", ".join(f"{name} from L = {knee:,.0f}" for name, knee in knees.items())
    slow, least = max(knees.items(), key=lambda knee: knee[1])
    axes.set_title(f"Over {slow} the kernel is the limit from L = {least:,.0f} on", fontsize=11)
    alt = (
        f"Modelled speed of a whole tile on {gpu} against the tokens of its block, one rising line "
        f"for each link that bends where it meets the kernel's {roof / 1e12:.0f} TFLOP/s: {said}."
    )
    return Picture(figure, alt)
