"""Call functions in forks of a process in which nothing is compiled yet: what runs once per process runs in each."""

import gc
import importlib
import multiprocessing
import pkgutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

import fusec
from tests.campaigns.injection.planting import Key, Place, places
from tests.campaigns.injection.workloads import pointwise

T = TypeVar("T")
FORK = multiprocessing.get_context("fork")
SECONDS = 300


class Died(Exception):
    """A fork ended, or was ended, without a result."""


def in_fork(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a fork of this process and return its result.

    Raises:
        Died: where there is none; what the function raised is on the error stream.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_send, args=(sender, function, arguments), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            child.kill()
        result: T = receiver.recv()
    except EOFError:
        child.join()
        raise Died(f"a fork ended with status {child.exitcode} and no result in {SECONDS} seconds") from None
    child.join()
    return result


def _send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))


def prepare() -> dict[Key, Place]:
    """Import every module of fusec and return its functions; compile with torch alone, which forks need not repeat."""
    for module in pkgutil.walk_packages(fusec.__path__, "fusec."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    torch.compile(pointwise, backend="aot_eager")(torch.arange(7)[None], torch.arange(7))
    torch._dynamo.reset()
    found = places()
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise write to every page, and so copy it
    return found
