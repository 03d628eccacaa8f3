"""Kernel configurations for a region on a GPU: the default, from the chip's profile, and candidates for autotuning.

Small M is bound by memory, so the bytes in flight decide (Little's law: bandwidth times latency); for large M the
reuse of a block's operands, and whether all processors have a block.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fusec.analysis.machine import Machine
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.triton.schedules.operands import MATRIX_ROWS, TiledProducts, length, multiplied, power_of_two
from fusec.codegen.triton.schedules.split_rows import levels, may_split, side_by_side
from fusec.ir.types import F64, accumulation, estimate, product
from fusec.loops.affine import at_least
from fusec.loops.attention import FEW_QUERIES, Attention
from fusec.loops.grouped import GroupedProducts, find_grouped_products, is_stored
from fusec.loops.indexing import LoopNest
from fusec.loops.kinds import Shape, is_computed

MAX_TILE = 16384
"""The longest row that a program holds without spilling registers (sm_80, sm_90 and gfx942)."""
MAX_SCANNED = 4096
"""The longest row that a program holds where it is scanned, in float64. Of 8192 elements, a softmax and its running sum
were seen to spill (sm_90), as NVIDIA's assembler takes 64 registers of 128."""
_SCANNED = 2048
"""Elements of a tile of a longer row that is scanned."""
_STAGES, _STAGES_OF_FEW = 3, 5
_STAGES_OF_AMD = 2
_WARPS_OF_FEW = 4
"""More warps have nothing left to multiply in a block of 16 rows and as many columns, and were seen to spill."""
_REGISTERS = 255
"""The hardware's limit, which NVIDIA's assembler is to use before it spills. By default it was seen to spill one of 49
or 81 for the sake of occupancy, where memory is the bottleneck, and two of 156 in attention of half types for sm_120,
where attention in float32 takes 80 by default and was seen to spill with this limit."""
_TILE = 8192
"""Elements of a block of the weights of a small-M GEMM."""
_DEPTH_OF_ONE = 512
_DEPTHS = {1: 256, 2: 128, 4: 32, 8: 32}
"""Elements of a block along the summed axes for a matrix unit, by bytes of an element."""
_SPLITS = (1, 2, 4, 8)
_PARTS_OF_KEYS = (*_SPLITS, 16, 32)
_PARTS_OF_SUMS = tuple(1 << n for n in range(17))
_MOST_BLOCKS = 128
"""The most blocks of a part: rounding errors grow with the number of consecutive additions."""
_ROWS = 32
"""Rows of a block that is reduced, where rows are contiguous."""
_LEAST_BLOCKS = 2
"""The fewest blocks along the sum, or of keys, of a part."""
_LATENCY = 1e-6
"""Seconds from the request of a block to that of the next one, under load: an estimate, as no datasheet has it."""
_RESIDENT = 8
"""Approximate number of programs that are resident on a processor."""
_MANY = {1: (128, 128, 128), 2: (128, 128, 64), 4: (64, 64, 32), 8: (16, 16, 32)}
"""Large M: rows, columns of all products together and depth of a block, by bytes of an element."""
_WIDE = {"sm_90": 2, "sm_100": 1}
"""The most products of a block of half types that has twice the columns: matrix units that read their operands from
shared memory leave registers for the epilogue. Elsewhere, and with more products, such blocks were seen to spill."""
_TRANSPOSED = 64
"""The fewest rows of a weight for a transposed block, the first operand of these units; the second may be narrower."""
_DEMANDING, _MOST_TILES = frozenset({"erf"}), 2
"""Operations that need so many registers that they were seen to spill after a wide block, and the most tiles that may
be loaded there, over all products: two for each of two, as in a rotary embedding, were seen to spill too."""
_LEAST = 32 * 32
"""Sums of the smallest block of a large-M GEMM."""
_SUMS = 1 << 15
"""The most sums of a block: half of the registers of a processor."""
_QUERIES = {2: (64, 32), 4: (32, 32), 8: (4, 16)}
"""Queries and keys of a block, by bytes of an element: with their sums they fit into registers."""
_WIDTH = 128
"""Elements of a value up to which a block has that many keys; with wider values it has fewer."""
_OTHERS = 10
"""The most candidates besides the default."""


def default_config(nest: LoopNest, shape: Shape, machine: Machine, lanes: int) -> KernelConfig:
    """Return the configuration for a region on a GPU, from its profile; nothing is timed."""
    if shape.attention is not None:
        return _attention(shape.attention, machine)
    if shape.kind == "contraction":
        products = TiledProducts(nest, shape)
        return _few_rows(products, machine) if products.few else _many_rows(products, machine)
    if (groups := find_grouped_products(nest, shape)) is not None:
        return _groups(groups, machine)
    if shape.scans:
        whole = all(at_least(MAX_SCANNED, axis.size) for item in shape.scans for axis in item.bound)
        return KernelConfig(columns=_SCANNED, registers=0 if whole else _registers(machine))
    return _long_rows(nest, shape, machine, lanes) if may_split(nest, shape) else KernelConfig(columns=lanes)


def other_configs(nest: LoopNest, shape: Shape, machine: Machine, default: KernelConfig) -> tuple[KernelConfig, ...]:
    """Return a few candidates, those nearest to the default first."""
    found: Iterator[KernelConfig]
    if shape.attention is not None:
        few = shape.attention.rows <= FEW_QUERIES
        near = _near(default, **{"splits" if few else "rows": (2, 0.5)}, depth=(2, 0.5))
        least = min(default.rows, default.depth, MATRIX_ROWS)
        near = (c for c in near if min(c.rows, c.depth) >= least)
        found = (c for c in near if few or _keys_copied(shape.attention, c) <= machine.shared_bytes)
    elif shape.kind == "contraction":
        found = _near_products(TiledProducts(nest, shape), machine, default)
    elif (groups := find_grouped_products(nest, shape)) is not None:
        found = _near_groups(groups, machine, default)
    else:
        found = (replace(default, warps=warps) for warps in (4, 8, 16))
        if default.splits > 1:
            parts = (replace(default, splits=int(default.splits * by)) for by in (2, 0.5) if default.splits * by > 1)
            found = itertools.chain(parts, [KernelConfig(columns=default.columns)], found)
    return tuple(itertools.islice(dict.fromkeys(c for c in found if c != default), _OTHERS))


def _long_rows(nest: LoopNest, shape: Shape, machine: Machine, lanes: int) -> KernelConfig:
    """Return one program per row, or splits of rows where they are predicted to pay for more launches."""
    bound = shape.reductions[0].bound
    count, length = (estimate(product(tuple(a.size for a in axes))) for axes in (shape.rows, bound))
    loads = [i for i in nest.walk() if i.kind == "load"]
    bytes_ = float(sum(estimate(product(tuple(a.size for a in i.axes))) * i.dtype.bytes for i in loads))
    rows = 1 if side_by_side(nest, shape) else min(_ROWS, power_of_two(count))
    block = KernelConfig(rows, lanes, min(lanes, power_of_two(length)) if rows == 1 else max(1, lanes // rows))
    size = max((i.dtype.bytes for i in loads), default=1)
    lengths = {bool(o.axes.intersection(bound)) for o in nest.outputs}  # of results: rows are reread for long ones
    passes, launches = len(levels(shape)) + (True in lengths), len(levels(shape)) + len(lengths) - 1

    def seconds(splits: int) -> float:
        if splits == 1:  # a program has a row, or some columns, and loads them block by block
            held = MAX_TILE if len(bound) == 1 else lanes
            programs, taken = (count, min(length, held)) if rows == 1 else (-(-count // lanes), lanes)
            times = 1 if rows == 1 and length <= held else passes
            return times * _reading(machine, bytes_, programs, 2, taken * size)
        joined = (passes - 1) * splits or 1  # every program of a grid combines all parts of its rows
        again = (1 + joined) * launches * splits * count * size / machine.bandwidth(cached=True)
        programs = -(-count // rows) * splits
        reading = _reading(machine, bytes_, programs, 2, block.rows * block.depth * size)
        return launches * machine.launch_us * 1e-6 + again + passes * reading

    blocks = length // block.depth
    many = [n for n in _PARTS_OF_SUMS[1:] if n * _LEAST_BLOCKS <= blocks <= n * _MOST_BLOCKS]
    splits = min((1, *many), key=seconds) if many else 1
    return replace(block, splits=splits) if splits > 1 else KernelConfig(columns=lanes)


def _groups(groups: GroupedProducts, machine: Machine) -> KernelConfig:
    """Return blocks of as many rows as a group has on average, or of few rows as for a small-M GEMM."""
    rows, bytes_ = estimate(product(tuple(axis.size for axis in groups.rows))), _bytes_of_groups(groups)
    most, columns, depth = _MANY[bytes_]
    stored = all(is_stored(right) for pairs in groups.products.values() for _, right in pairs)
    if not stored or machine.code not in _WIDE:  # blocks of 128 rows were seen to spill (sm_80, sm_120)
        most = max(MATRIX_ROWS, most // 2)
    block = min(most, max(MATRIX_ROWS, power_of_two(-(-rows // groups.count))))
    stages, warps = _stages(machine), 0
    if few := block == MATRIX_ROWS and bytes_ < F64.bytes:
        depth, stages, warps = _DEPTHS[bytes_], _stages(machine, _STAGES_OF_FEW), _WARPS_OF_FEW
        columns = _TILE // depth
    depth = min(depth, max(MATRIX_ROWS, power_of_two(max(length(one.bound) for one in groups.products))))
    count, used = len(groups.products), min(rows, groups.count)
    while columns > MATRIX_ROWS * count and used * count * length((groups.column,)) < machine.threads * columns:
        columns //= 2
    columns = max(MATRIX_ROWS * count, columns)
    config = KernelConfig(block, columns, depth, warps=warps, stages=stages, registers=_registers(machine))
    return _with_fewer_stages(config, bytes_, machine) if few else config


def _near_groups(groups: GroupedProducts, machine: Machine, default: KernelConfig) -> Iterator[KernelConfig]:
    bytes_, least = _bytes_of_groups(groups), MATRIX_ROWS * len(groups.products)
    for config in _near(default, rows=(2, 0.5), columns=(2, 0.5), depth=(2, 0.5)):
        legal = config.columns >= least and min(config.rows, config.depth) >= MATRIX_ROWS
        if legal and config.rows * config.columns <= _SUMS and _copied(config, bytes_) <= machine.shared_bytes:
            yield config


def _bytes_of_groups(groups: GroupedProducts) -> int:
    return max(multiplied(*pair).bytes for pairs in groups.products.values() for pair in pairs)


def _stages(machine: Machine, stages: int = _STAGES) -> int:
    return _STAGES_OF_AMD if machine.code.startswith("gfx") else stages


def _registers(machine: Machine) -> int:
    return 0 if machine.code.startswith("gfx") else _REGISTERS


def _few_rows(products: TiledProducts, machine: Machine) -> KernelConfig:
    """Return all rows, few enough columns to occupy every processor, and as many splits as are predicted to pay."""
    bytes_ = _bytes_multiplied(products)
    rows = power_of_two(products.count) if isinstance(products.count, int) else 1
    if not products.on_matrix_unit:
        depth = _depth(products, _DEPTHS[bytes_] if products.shape.rows else _DEPTH_OF_ONE)
        config = KernelConfig(rows, _TILE // depth // rows, depth)  # whose loads go to registers
    else:
        depth = _depth(products, _DEPTHS[bytes_])
        columns = max(_TILE // depth, _TRANSPOSED * products.most if _may_transpose(products, machine) else 0)
        config = KernelConfig(
            max(MATRIX_ROWS, rows), columns, depth, 1, _WARPS_OF_FEW, _stages(machine, _STAGES_OF_FEW)
        )
    config = replace(config, registers=_registers(machine))
    while config.columns > products.least_columns * products.most and products.programs(config) < machine.threads:
        config = replace(config, columns=config.columns // 2)
    transposed = _may_transpose(products, machine) and config.columns >= _TRANSPOSED * products.most
    return _with_stages_and_splits(products, machine, replace(config, transposed=transposed))


def _with_stages_and_splits(products: TiledProducts, machine: Machine, config: KernelConfig) -> KernelConfig:
    """Return a small-M configuration with as many stages as fit into shared memory, and splits that pay."""
    config = _with_fewer_stages(config, _bytes_multiplied(products), machine)
    least = products.weights / machine.bandwidth(cached=False)
    if least < machine.launch_us * 1e-6:
        return config  # too little work to pay for another launch, whatever the latency
    splits = (n for n in _SPLITS if n * _LEAST_BLOCKS <= products.longest // config.depth or n == 1)
    return min((replace(config, splits=n) for n in splits), key=lambda c: _time_of_few(products, machine, c))


def _with_fewer_stages(config: KernelConfig, bytes_: int, machine: Machine) -> KernelConfig:
    """Return a small-M configuration with as many stages as fit into half of the shared memory."""
    while config.stages > 2 and _copied(config, bytes_) > machine.shared_bytes // 2:
        config = replace(config, stages=config.stages - 1)
    return config


def _may_transpose(products: TiledProducts, machine: Machine) -> bool:
    """Return whether the matrix units read both operands from shared memory, in the multiplied type."""
    return products.on_matrix_unit and _bytes_multiplied(products) == 2 and machine.code in _WIDE


def _time_of_few(products: TiledProducts, machine: Machine, config: KernelConfig) -> float:
    """Return the seconds to read the weights at the bandwidth of the bytes in flight; splits cost a launch."""
    share = min(config.columns, products.all_columns) * config.depth / (products.all_columns * products.longest)
    block = share * products.weights
    seconds = _reading(machine, products.weights, products.all_programs(config), config.stages, block)
    if config.splits > 1:
        sums = 2 * config.splits * estimate(products.count) * products.all_columns * products.dtype.bytes
        seconds += machine.launch_us * 1e-6 + sums / machine.bandwidth(cached=True)
    return seconds


def _many_rows(products: TiledProducts, machine: Machine) -> KernelConfig:
    """Return the largest block that the registers hold, or a smaller one where there would be few programs."""
    bytes_ = _bytes_multiplied(products)
    rows, columns, depth = _MANY[bytes_]
    light = products.epilogue_ops.isdisjoint(_DEMANDING) and products.most * products.epilogue_tiles <= _MOST_TILES
    if bytes_ == 2 and products.most <= _WIDE.get(machine.code, 0) and light:
        columns *= 2
    rows = min(rows, power_of_two(estimate(products.count)))
    unpacks = any(map(is_computed, products.shape.contractions))
    registers = _registers(machine) if unpacks else 0
    config = KernelConfig(rows, columns, _depth(products, depth), stages=_stages(machine), registers=registers)
    while config.rows * config.columns > _LEAST and products.all_programs(config) < machine.threads:
        wide = config.columns >= config.rows
        config = replace(config, columns=config.columns // 2) if wide else replace(config, rows=config.rows // 2)
    return config


def _depth(products: TiledProducts, most: int) -> int:
    """Return the elements of a block along the summed axes."""
    return min(most, products.deepest)


def _attention(attention: Attention, machine: Machine) -> KernelConfig:
    """Return blocks whose sums registers hold; few queries are one block."""
    bytes_ = max(attention.weights.dtype.bytes, attention.value[0].dtype.bytes)
    rows, keys = _QUERIES[bytes_]
    widest = max(_WIDTH, *(power_of_two(elements.count) for elements in (attention.columns, attention.depth)))
    least = 1 if accumulation(attention.product.dtype) == F64 else MATRIX_ROWS
    rows, keys = (max(least, n * _WIDTH // widest) for n in (rows, keys))
    if attention.rows > FEW_QUERIES:
        registers = _REGISTERS if machine.code == "sm_120" and bytes_ == 2 else 0
        config = KernelConfig(rows, depth=keys, stages=_stages(machine), registers=registers)
        while config.stages > 1 and _keys_copied(attention, config) > machine.shared_bytes:
            config = replace(config, stages=config.stages - 1)
        return config
    rows = max(least, power_of_two(attention.rows))
    config = KernelConfig(rows, depth=keys, stages=_stages(machine), registers=_registers(machine))
    blocks = estimate(attention.key_count) // keys
    splits = (n for n in _PARTS_OF_KEYS if n * _LEAST_BLOCKS <= blocks or n == 1)
    return min((replace(config, splits=n) for n in splits), key=lambda c: _time_of_keys(attention, machine, c))


def _keys_copied(attention: Attention, config: KernelConfig) -> int:
    """Return the bytes of shared memory of a block's queries and of the keys and values in flight, as observed."""
    keys, values = (
        power_of_two(elements.count) * items[0].dtype.bytes
        for elements, items in ((attention.depth, attention.key), (attention.columns, attention.value))
    )
    return config.rows * keys + (config.stages - 1) * config.depth * (keys + values)


def _time_of_keys(attention: Attention, machine: Machine, config: KernelConfig) -> float:
    """Return the seconds to read keys and values at the bandwidth of the bytes in flight; splits cost a launch."""
    columns = attention.columns.count
    wide = attention.depth.count * attention.key[0].dtype.bytes + columns * attention.value[0].dtype.bytes
    heads = estimate(product(tuple(axis.size for axis in attention.batch)))
    block = config.depth * wide
    bytes_ = heads * estimate(attention.key_count) * wide
    seconds = _reading(machine, bytes_, heads * config.splits, config.stages, block)
    if config.splits > 1:
        found = 2 * config.splits * heads * attention.rows * (columns + 2) * accumulation(attention.product.dtype).bytes
        seconds += machine.launch_us * 1e-6 + found / machine.bandwidth(cached=True)
    return seconds


def _reading(machine: Machine, bytes_: float, programs: float, stages: int, block: float) -> float:
    """Return the seconds to read, where each of these programs has some blocks of so many bytes in flight."""
    at_once = min(programs, _RESIDENT * machine.threads) * max(1, stages - 1) * block
    return bytes_ / min(machine.bandwidth(cached=False), at_once / _LATENCY)


def _near(default: KernelConfig, **factors: tuple[float, ...]) -> Iterator[KernelConfig]:
    """Yield the default with one number changed at a time."""
    for field, by in factors.items():
        for factor in by:
            changed: dict[str, Any] = {field: max(1, int(getattr(default, field) * factor))}
            yield replace(default, **changed)
    yield from (replace(default, stages=stages) for stages in (3, 4, 2))
    yield from (replace(default, warps=warps) for warps in (4, 8))


def _near_products(products: TiledProducts, machine: Machine, default: KernelConfig) -> Iterator[KernelConfig]:
    if products.few:
        others = _near(default, splits=(2, 0.5), columns=(2, 0.5), depth=(2,))
        found = itertools.chain(_transposed(products, machine, default), others)
    else:
        others = _near(default, rows=(2, 0.5), columns=(2, 0.5), depth=(2, 0.5))
        found = itertools.chain(_by_descriptors(products, machine, default), others)
    for config in found:
        if _fits(products, machine, config):
            yield config


def _transposed(products: TiledProducts, machine: Machine, default: KernelConfig) -> Iterator[KernelConfig]:
    """Yield the default with ``transposed`` inverted, and with wide blocks, by address and by descriptor."""
    if _may_transpose(products, machine):
        yield replace(default, transposed=not default.transposed)
        columns = max(default.columns, _TRANSPOSED * products.most)
        wide = _with_stages_and_splits(products, machine, replace(default, columns=columns, splits=1, transposed=True))
        yield from (wide, *_by_descriptors(products, machine, wide))


def _by_descriptors(products: TiledProducts, machine: Machine, default: KernelConfig) -> Iterator[KernelConfig]:
    """Yield the default, and one with one more stage, with loads by tensor descriptor, where the chip has them.

    Only for half types: operands in float32 go through registers.
    """
    plain = any(o.kind == "load" and o.dtype.bytes == 2 for c in products.shape.contractions for o in c.operands)
    if plain and machine.has_descriptors:
        yield from (replace(default, descriptors=True, stages=stages) for stages in (default.stages, 4))


def _fits(products: TiledProducts, machine: Machine, config: KernelConfig) -> bool:
    """Return whether a configuration is legal and fits the machine."""
    if config.columns < products.least_columns * products.most:
        return False
    if not products.least_depth <= config.depth <= products.deepest:
        return False
    if config.splits > 1 and config.splits * config.depth > products.longest:
        return False
    return (
        config.rows * config.columns <= _SUMS and _copied(config, _bytes_multiplied(products)) <= machine.shared_bytes
    )


def _copied(config: KernelConfig, bytes_: int) -> int:
    """Return the approximate bytes of shared memory of blocks in flight to a matrix unit."""
    return config.stages * (config.rows + config.columns) * config.depth * bytes_


def _bytes_multiplied(products: TiledProducts) -> int:
    return max(multiplied(*c.pairs[0]).bytes for c in products.shape.contractions)
