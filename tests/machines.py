"""Processors for tests, whichever one they run on: profiles that say whose products of many rows are quicker."""

from dataclasses import replace

import torch

from fusec.analysis.machine import MEASURED, Machine, assumed_cpu, store_machine
from fusec.config import Config


def cpu(**products: float) -> Machine:
    """A processor on which the library's products reach 100 GFLOP/s, and generated ones what is given by type."""
    peaks = {"vector f32": 50.0, "matrix f32": 100.0} | {f"product {dtype}": rate for dtype, rate in products.items()}
    return replace(assumed_cpu(torch.get_num_threads()), source=MEASURED, peaks=peaks)


def profile(**products: float) -> Config:
    """Options of a compile for it, all of which share a folder for its profile and kernels; nothing may fall back."""
    name = "-".join(f"{dtype}-{rate}" for dtype, rate in products.items())
    config = Config(strict=True, cache_dir=str(Config.from_environment().cache_path() / f"machine-{name}"))
    store_machine(cpu(**products), config)
    return config
