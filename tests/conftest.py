"""Options, marks, and the worlds of ranks that tests run on."""

from collections.abc import Callable, Iterator

import pytest
import torch

import cpref

from .distributed.ranks import Worlds, left_over


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the full product of the exactness matrix")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # why: the tensors are small, and other ranks want the cores


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """At the end of all tests no process that they started runs any more."""
    yield  # why: set up before every other fixture of the session, so torn down after them
    left = left_over()
    assert not left, f"still running: {left}"


@pytest.fixture(scope="session")
def processes() -> Iterator[Worlds]:
    """processes(P)(fn, *args): fn(group, *args) on P real ranks that stay for the session."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.distributed)])
def world(request: pytest.FixtureRequest) -> Callable[..., list]:
    """world(fn, P, *args): fn(group, *args) on P ranks, once threads and once real processes."""
    if request.param == "threads":
        return cpref.run_local
    worlds = request.getfixturevalue("processes")
    return lambda fn, ranks, *args: worlds(ranks)(fn, *args)
