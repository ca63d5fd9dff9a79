"""`cpref doctor`: what this machine has, what would not work, and how to mend it."""

import argparse
import itertools
import json
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from .launch import RanksFailed, launch
from .machine import cores, free_memory


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. remedy: what to do, when it is not ok; constants: the value as
    numbers, where it is made of some."""

    name: str
    value: str
    ok: bool = True
    remedy: str = ""
    constants: dict | None = None


def examine() -> Iterator[Finding]:
    """Look at everything, the slow ones last."""
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _torch,
        _accelerators,
        _machine,
        _network,
        _jupyter,
        _pins,
        _ranks,
    )
    for look in looks:
        try:
            yield from look()
        except Exception as error:  # why: what breaks one look must not hide the others
            name = look.__name__.strip("_")
            yield Finding(name, f"{type(error).__name__}: {error}", False, "mend what it says")


def _python() -> Iterator[Finding]:
    found = platform.python_version()
    enough = sys.version_info >= (3, 11)
    where = f"{found}, environment {Path(sys.prefix).name}"
    yield Finding("Python", where, enough, "install Python 3.11 or newer")


def _torch() -> Iterator[Finding]:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    yield Finding("torch", torch.__version__, release >= (2, 9), "pip install 'torch>=2.9'")
    if not dist.is_available():
        yield Finding("torch.distributed", "missing", False, "install a torch built with it")
        return
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    has = [name for name, available in backends.items() if available]
    yield Finding("backends", ", ".join(has), backends["gloo"], "install a torch built with gloo")


def _accelerators() -> Iterator[Finding]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        yield Finding("accelerators", "none: ranks run on the processor, over gloo")
        return
    count = torch.accelerator.device_count()
    names = {torch.get_device_module(kind).get_device_name(i) for i in range(count)}
    yield Finding("accelerators", f"{count} x {', '.join(sorted(names))}")
    if shutil.which("nvidia-smi"):
        shown = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30
        )
        if shown.returncode == 0:
            yield Finding("links", "\n" + shown.stdout.rstrip())


def _machine() -> Iterator[Finding]:
    yield Finding("cores", "1: ranks take turns on it" if cores() == 1 else str(cores()))
    free = free_memory() / 2**30
    yield Finding("free memory", f"{free:.1f} GiB", free > 2, "close programs: lessons want 2 GiB")
    if Path("/dev/shm").exists():
        shared = shutil.disk_usage("/dev/shm").free / 2**20
        remedy = "give the container more: docker run --shm-size=1g"
        yield Finding("/dev/shm", f"{shared:.0f} MiB free", shared > 60, remedy)


def _network() -> Iterator[Finding]:
    name = socket.getfqdn()  # what the plain torchrun tells the ranks; %%torchrun says localhost
    try:
        address = socket.gethostbyname(name)
        socket.create_server((address, 0)).close()  # why: a name may be that of another machine
        yield Finding("host name", f"{name} is {address}")
    except OSError as error:
        remedy = (
            f"add '127.0.0.1 {socket.gethostname()}' to /etc/hosts, or start torchrun with "
            "--local-addr=localhost, else it hangs; %%torchrun does without the name"
        )
        yield Finding("host name", f"{name}: {error}", False, remedy)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Finding("free port", f"found one on localhost ({server.getsockname()[1]})")
    except OSError as error:
        yield Finding("free port", str(error), False, "allow this user to listen on localhost")


def _jupyter() -> Iterator[Finding]:
    lacking = [name for name in ("jupyterlab", "ipywidgets", "ipykernel") if not find_spec(name)]
    if lacking:
        remedy = "pip install 'cpref[lab]', or make setup"
        yield Finding("Jupyter", f"without {', '.join(lacking)}", False, remedy)
        return
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    remedy = f"{sys.executable} -m ipykernel install --sys-prefix"
    try:
        kernel = Path(KernelSpecManager().get_kernel_spec("python3").argv[0])
    except NoSuchKernel:
        yield Finding("Jupyter kernel", "no kernel 'python3'", False, remedy)
        return
    # why: by folder, since the programs of two environments are often links to the same one
    same = (
        not kernel.is_absolute() or kernel.parent.resolve() == Path(sys.executable).parent.resolve()
    )
    yield Finding("Jupyter kernel", "this Python" if same else str(kernel), same, remedy)


def _pins() -> Iterator[Finding]:
    path = Path(__file__).parents[2] / "constraints.txt"
    if not path.exists():
        return
    differ = []
    for line in path.read_text().splitlines():
        name, _, pinned = line.partition("==")
        if not pinned or line.startswith("#"):
            continue
        try:
            found = version(name).split("+")[0]
        except PackageNotFoundError:
            continue
        if found != pinned.split(";")[0].strip():
            differ.append(f"{name} {found} instead of {pinned}")
    if differ:
        yield Finding("tested versions", f"differs in {', '.join(differ)}: not tested together")
    else:
        yield Finding("tested versions", "all as in constraints.txt")


_ALL_REDUCE = """
import cpref, torch
device = cpref.init(timeout=60)
x = torch.ones(1, device=device)
torch.distributed.all_reduce(x)
cpref.keep(sum=x.item())
"""


def _ranks() -> Iterator[Finding]:
    """Real ranks add up ones where they would compute: two, if there are not fewer accelerators."""
    ranks = 2
    if torch.accelerator.is_available():
        ranks = min(2, torch.accelerator.device_count())
    try:
        sums = [kept["sum"] for kept in launch(ranks, cell=_ALL_REDUCE, timeout=90).by_rank]
    except RanksFailed as error:
        remedy = "see the lines above: host name, ports and /dev/shm are the usual causes"
        yield Finding("ranks", str(error), False, remedy)
        return
    remedy = "this torch adds wrongly: install another build"
    yield Finding(
        "ranks", f"{ranks} started with torchrun, sums {sums}", sums == [ranks] * ranks, remedy
    )


_FIT = """
import cpref, torch
from dataclasses import asdict
from cpref.measure.fit import Problem, fit_here, words
torch.set_num_threads(1)
device = cpref.init(timeout=300)
found = fit_here(Problem(device=device.type))
cpref.keep(words=words(found), fit=asdict(found))
"""


def _fit() -> Iterator[Finding]:
    """The constants of the time model on this machine; printed, and stored nowhere."""
    ranks = 2
    if torch.accelerator.is_available():
        ranks = min(2, torch.accelerator.device_count())
    try:
        kept = launch(ranks, cell=_FIT, timeout=300).by_rank[0]
    except RanksFailed as error:
        yield Finding("fit", str(error), False, "see the lines above; try again on a quiet machine")
        return
    yield Finding("fit", kept["words"], constants=kept["fit"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fit", action="store_true", help="measure the constants of the time model, too (a minute)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 0 if all that is needed works, else 1."""
    findings = []
    for finding in itertools.chain(examine(), _fit() if args.fit else ()):
        findings.append(finding)
        if not args.json:
            value = finding.value.replace("\n", f"\n{'':22}")
            print(f"{'ok ' if finding.ok else 'NOT'}  {finding.name:16} {value}")
            if not finding.ok:
                print(f"     {'':16} -> {finding.remedy}")
    wrong = [finding for finding in findings if not finding.ok]
    if args.json:
        print(json.dumps({"ok": not wrong, "findings": [asdict(f) for f in findings]}, indent=2))
    elif wrong:
        print(f"{len(wrong)} of {len(findings)} would not work: mend what is marked NOT")
    else:
        print("everything that the course needs works here")
    return 1 if wrong else 0
