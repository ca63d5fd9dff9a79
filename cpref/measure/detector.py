"""A compact vision model, for which context parallelism is the wrong tool: what it needs instead.

A detector of the YOLO kind is convolutions over an image, and no sequence. What attention there is
in it looks at the coarsest map alone, one position for each 32 x 32 pixels. The whole model and its
states take about a hundredth of a GPU, or less. So each GPU computes whole images, and the
gradients are added up: data parallelism.

Source: Ultralytics, ultralytics/cfg/models/11/yolo11.yaml, for parameters and GFLOPs of a forward
pass at 640 x 640 pixels; there, too, the one block with attention (C2PSA) at stride 32.
"""

from dataclasses import dataclass

from .division import GRADIENT, OPTIMIZER, PARAMETER
from .hardware import ACHIEVED, Gpu, Network


@dataclass(frozen=True)
class Detector:
    """flops: of one image forward; side, stride: pixels of the image, and for each position of the
    map that attends."""

    name: str
    parameters: int
    flops: float
    side: int = 640
    stride: int = 32

    @property
    def positions(self) -> int:
        """That attend to each other."""
        return (self.side // self.stride) ** 2

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer, as `division` counts them."""
        return self.parameters * (PARAMETER + GRADIENT + OPTIMIZER)


DETECTORS = {
    detector.name: detector
    for detector in (
        Detector("yolo11n", 2_624_080, 6.6e9),
        Detector("yolo11x", 56_966_176, 196.0e9),
    )
}


@dataclass(frozen=True)
class DataParallel:
    """Modelled, for one GPU: seconds of an image forward and backward, and of adding up gradients;
    images: from how many on, in a step, the second is the shorter one."""

    detector: Detector
    gpus: int
    image: float
    gradients: float

    @property
    def images(self) -> int:
        return max(1, round(self.gradients / self.image + 0.5))


def data_parallel(detector: Detector, gpus: int, gpu: Gpu, network: Network) -> DataParallel:
    """A ring of all-reduce sends each number twice; backward costs twice what forward does."""
    image = 3 * detector.flops / (ACHIEVED.matmul * gpu.flops)
    sent = 2 * GRADIENT * detector.parameters * (gpus - 1) / gpus
    link = network.link(gpus)
    return DataParallel(
        detector, gpus, image, link.seconds(sent, 2 * (gpus - 1)) if gpus > 1 else 0.0
    )
