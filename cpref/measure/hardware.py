"""Named GPUs and links, from their makers' datasheets, as the planner's model wants them.

FLOP/s are of bfloat16 (and float8) tensor cores without sparsity: datasheets that say "with
sparsity" promise twice as much. GB are 10^9 bytes. Bandwidths are of one direction: NVIDIA gives
the sum of both for NVLink and PCIe.

    GPU         bf16      fp8       memory   HBM         NVLink     datasheet
    a100-80gb   312e12    -         80 GB    2.039 TB/s  600 GB/s   NVIDIA A100 80GB SXM, 2021
    h100-80gb   989e12    1979e12   80 GB    3.35 TB/s   900 GB/s   NVIDIA H100 SXM, 2023
    h200        989e12    1979e12   141 GB   4.8 TB/s    900 GB/s   NVIDIA H200 SXM, 2024
    b200        2250e12   4500e12   180 GB   8 TB/s      1800 GB/s  NVIDIA DGX B200, 2024: for its 8
                                                                    GPUs 1,440 GB, 72e15 fp8 sparse

    link             one direction, each GPU      source
    nvlink3, 4, 5    300, 450, 900 GB/s           the datasheets above, half of both directions
    infiniband-ndr   50 GB/s                      400 Gb/s: NVIDIA ConnectX-7; one for each GPU of a
                                                  DGX H100
    pcie5            64 GB/s                      16 lanes; H100 PCIe datasheet: 128 GB/s both ways
    nvlink+ib        the GPU's NVLink in a node of 8, infiniband-ndr between nodes: DGX H100

What no datasheet says is assumed, and printed with every plan: how much of a peak is reached
(`ACHIEVED`), and what a message costs before its first byte arrives. For comparison:
FlashAttention-3 (arXiv 2407.08608) reaches up to 740e12 FLOP/s forward on an H100, 0.75 of its
peak, on its best shapes; Llama 3 (arXiv 2407.21783, table 4) 0.38 to 0.43 for a whole step, waits
included.
"""

from dataclasses import dataclass

from .times import Link, Machine, Rates


@dataclass(frozen=True)
class Gpu:
    """flops, fp8_flops: per second, dense; memory: bytes; memory_bandwidth: bytes per second;
    nvlink: the name of its link within a node."""

    name: str
    flops: float
    fp8_flops: float | None
    memory: float
    memory_bandwidth: float
    nvlink: str


@dataclass(frozen=True)
class Achieved:
    """The parts of the peaks that the model reckons with. Assumptions, not measurements.

    matmul: of the FLOP/s, by the products of a layer; attention_forward, attention_backward: by a
    flash kernel; link: of a link's bandwidth; memory: of the GPU's memory that a job may fill, the
    rest being the allocator's, NCCL's and the CUDA context's.
    """

    matmul: float = 0.6
    attention_forward: float = 0.6
    attention_backward: float = 0.5
    link: float = 0.75
    memory: float = 0.92


ACHIEVED = Achieved()
PER_NODE = 8
_NVLINK_LATENCY, _NETWORK_LATENCY, _PCIE_LATENCY = 5e-6, 15e-6, 10e-6  # seconds; assumed

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80gb", 312e12, None, 80e9, 2.039e12, "nvlink3"),
        Gpu("h100-80gb", 989e12, 1979e12, 80e9, 3.35e12, "nvlink4"),
        Gpu("h200", 989e12, 1979e12, 141e9, 4.8e12, "nvlink4"),
        Gpu("b200", 2250e12, 4500e12, 180e9, 8e12, "nvlink5"),
    )
}

_LINKS = {
    "nvlink3": Link(_NVLINK_LATENCY, 300e9),
    "nvlink4": Link(_NVLINK_LATENCY, 450e9),
    "nvlink5": Link(_NVLINK_LATENCY, 900e9),
    "infiniband-ndr": Link(_NETWORK_LATENCY, 50e9),
    "pcie5": Link(_PCIE_LATENCY, 64e9),
}
LINKS = (*_LINKS, "nvlink+ib")


@dataclass(frozen=True)
class Network:
    """What joins the GPUs of a job: within a node of PER_NODE, and between nodes, if at all."""

    name: str
    inside: Link
    between: Link | None

    def link(self, spread: int) -> Link:
        """Of ranks that lie in a run of `spread` neighbouring GPUs: the slowest that they need."""
        return self.inside if spread <= PER_NODE or self.between is None else self.between


def gpu_named(name: str) -> Gpu:
    """ValueError, with the known ones, if there is none of that name."""
    if name.lower() not in GPUS:
        raise ValueError(f"gpu is {name!r}; it must be one of {', '.join(GPUS)}")
    return GPUS[name.lower()]


def network_named(name: str, gpu: Gpu, achieved: Achieved = ACHIEVED) -> Network:
    """ValueError, with the known ones, if there is none of that name."""
    if name.lower() not in LINKS:
        raise ValueError(f"link is {name!r}; it must be one of {', '.join(LINKS)}")
    name = name.lower()
    reached = {key: Link(x.latency, achieved.link * x.bandwidth) for key, x in _LINKS.items()}
    if name == "nvlink+ib":
        return Network(name, reached[gpu.nvlink], reached["infiniband-ndr"])
    if name == "infiniband-ndr":
        return Network(name, reached[name], reached[name])
    return Network(name, reached[name], None)


def attention_machine(gpu: Gpu, link: Link, achieved: Achieved = ACHIEVED) -> Machine:
    """A GPU as the model of an attention wants it: seconds for a pair, and for adding a number.

    A pair costs 4 FLOPs for each dimension of a head forward, 10 backward. Along the diagonal a
    kernel computes whole blocks of 128 keys, half of them for nothing. To add a number to a sum in
    float32, 12 bytes pass through the memory.
    """
    number = 12 / gpu.memory_bandwidth
    forward = 4 / (achieved.attention_forward * gpu.flops)
    backward = 10 / (achieved.attention_backward * gpu.flops)
    rates = (Rates(pair, 64 * pair, number) for pair in (forward, backward))
    return Machine(*rates, link)
