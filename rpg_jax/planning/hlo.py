"""Counts operations, memory traffic and network traffic of a compiled program in its optimised HLO text.

XLA's own cost analysis counts the body of a loop once and a Pallas kernel as nothing. Here the body counts for each run
that the loop's condition allows, once without a constant bound, and kernels count by their shapes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_FREE = {"tuple", "get-tuple-element", "bitcast", "parameter", "constant", "while", "conditional", "call", "after-all"}
_KERNEL_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}


@dataclasses.dataclass
class Costs:
    """Costs on one device.

    Attributes:
      flops: operations of matrix products and kernels.
      bytes: bytes read from and written to HBM.
      collectives: {a kind in `COLLECTIVES`: bytes that the device receives when a ring sends them}.
      launches: number of collectives; each has a latency, however few its bytes are.
    """

    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict[str, float] = dataclasses.field(default_factory=dict)
    launches: float = 0.0

    def add(self, other: Costs, times: float = 1) -> None:
        """Adds `times` the costs of `other` to these costs, in place."""
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.launches += times * other.launches
        for kind, size in other.collectives.items():
            self.collectives[kind] = self.collectives.get(kind, 0.0) + times * size


def count(text: str, *, cheapest: bool = False) -> Costs:
    """Returns the costs on one device of a compiled program, whose optimised HLO is `text`, from `compiled.as_text()`.
    Of a condition, the branch with most operations and bytes counts, or with `cheapest` the branch with fewest. Raises
    ValueError if the groups of a collective are written in a form that is not known."""
    module = _Module(text, min if cheapest else max)
    return module.costs(module.entry)


class _Module:
    """The computations of an HLO module, with the costs of each. `chosen`, min or max, picks a condition's branch."""

    def __init__(self, text: str, chosen: Callable[..., Costs]):
        self.computations, self.entry = computations(text)
        self.chosen = chosen
        self.done: dict[str, Costs] = {}

    def costs(self, name: str) -> Costs:
        """Costs of one run of the computation `name`, with the computations that it calls; counted once, then kept."""
        if name not in self.done:
            self.done[name] = costs = Costs()
            for instruction in self.computations[name].values():
                costs.add(self._instruction(instruction))
        return self.done[name]

    def _instruction(self, i: Instruction) -> Costs:
        costs = Costs()
        if i.op == "while":
            costs.add(self.costs(i.called("body")), self._trips(i.called("condition")))
        elif i.op == "conditional":
            branches = captured(r"branch_computations=\{([^}]*)\}", i.attributes)
            names = branches[0].replace("%", "").split(", ") if branches else []
            names += filter(None, (i.called("true_computation"), i.called("false_computation")))
            costs.add(self.chosen((self.costs(n) for n in names), key=lambda c: c.bytes + c.flops, default=Costs()))
        elif i.op in ("call", "call-start") and i.called("to_apply"):
            costs.add(self.costs(i.called("to_apply")))
        elif i.op in ("fusion", "async-start", "call-start"):
            inner = self.costs(i.called("calls"))
            kinds = dict(inner.collectives)
            if "reduce-scatter" in i.called("calls") and "all-reduce" in kinds:
                kinds["reduce-scatter"] = kinds.get("reduce-scatter", 0.0) + kinds.pop("all-reduce") / 2
            costs.add(Costs(inner.flops, self._fusion_bytes(i), kinds, inner.launches))
        else:
            kind = i.op.removesuffix("-start")
            if kind in COLLECTIVES:
                sizes = sum(bytes_of(o.type, everywhere=True) for o in i.operands)
                costs.collectives[kind] = sizes * _received(kind, replica_group_size(i.attributes))
                costs.launches = 1
            costs.flops, costs.bytes = _flops(i), _bytes(i)
        return costs

    def _trips(self, condition: str) -> int:
        """Runs of a loop whose `condition`, a computation, compares a counter from 0 with a constant; 1 for others."""
        instructions = self.computations.get(condition, {}).values()
        compares = [i for i in instructions if i.op in ("compare", "fusion")]
        bounds = [int(bound) for i in instructions for bound in captured(r"^constant\((\d+)\)", i.attributes)]
        return max(bounds) if len(compares) == 1 and bounds else 1

    def _sliced(self, name: str, number: int) -> float | None:
        """Bytes that the fused computation `name` reads of its parameter `number`; None if it reads not only slices."""
        body = self.computations[name].values()
        (parameter,) = (x for x in body if x.op == "parameter" and x.attributes.startswith(f"parameter({number})"))
        total = 0.0
        for use, operand in uses_of(parameter, body):
            if use.op in ("dynamic-slice", "gather") and operand == 0:
                total += bytes_of(use.type, everywhere=True)
            elif use.op == "fusion" and (part := self._sliced(use.called("calls"), operand)) is not None:
                total += part
            elif use.op != "dynamic-update-slice" or operand != 0:
                return None
        return total

    def _fusion_bytes(self, i: Instruction) -> float:
        """Bytes of a fusion's operands and results; an array that is only sliced or updated counts by its slice."""
        name, total = i.called("calls"), 0.0
        for n, operand in enumerate(i.operands):
            read = self._sliced(name, n)
            total += bytes_of(operand.type) if read is None else read
        root = next(x for x in self.computations[name].values() if x.root)
        for result in root.operands if root.op == "tuple" else [root]:
            written = result.type
            while result.op in ("bitcast", "copy", "convert") and result.operands:
                result = result.operands[0]
            if result.op == "dynamic-update-slice":
                written = result.operands[1].type
            total += bytes_of(written)
        return total


def _received(kind: str, group: int) -> float:
    """Bytes that a device receives for each byte of its operands in a collective of `group` devices."""
    share = (group - 1) / group
    return {"all-gather": group - 1, "all-reduce": 2 * share, "collective-permute": 1}.get(kind, share)


def _bytes(i: Instruction) -> float:
    if i.op in _FREE or i.op.endswith(("-done", "-update")) or 'target="AllocateBuffer"' in i.attributes:
        return 0
    sizes = [bytes_of(o.type) for o in i.operands]
    if i.op == "custom-call" and i.name.startswith("ragged_"):
        return _ragged_bytes(i)
    if i.op in ("slice", "dynamic-slice", "gather"):
        return 2 * bytes_of(i.type)
    if i.op == "slice-start":  # its type: the operand, the slice and a counter
        *_, part, _ = (found.group() for found in _ARRAY.finditer(i.type))
        return bytes_of(part, everywhere=True) + bytes_of(part)
    if i.op in ("dynamic-update-slice", "scatter"):
        return 2 * sum(sizes[1:2])
    if i.op.endswith("-start"):  # the type of a start repeats the operands
        return 2 * sum(sizes) if i.op == "copy-start" else sum(sizes)
    return sum(sizes) + bytes_of(i.type)


def _ragged_bytes(i: Instruction) -> float:
    """Bytes of the decode kernels, which get the cache of all layers as an operand. Attention reads one layer, which
    counts as full. The write of a token moves tiles that are too small to count."""
    total = bytes_of(i.type) if i.name.startswith("ragged_attention") else 0.0
    for operand in i.operands:
        dims = shape_of(operand.type)
        if len(dims) < 5:
            total += bytes_of(operand.type)
        elif i.name.startswith("ragged_attention"):
            total += bytes_of(operand.type) / dims[0]
    return total


def _flops(i: Instruction) -> float:
    if i.op == "dot":
        lhs = shape_of(i.operands[0].type)
        (contracted,) = captured(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
        depth = math.prod(lhs[int(d)] for d in contracted.split(",") if d)
        return 2.0 * math.prod(shape_of(i.type)) * depth
    if i.op == "convolution":
        return _convolution(i)
    if i.op == "custom-call" and "tpu_custom_call" in i.attributes:
        return _kernel(i)
    return 0.0


def _convolution(i: Instruction) -> float:
    """Operations: 2 · out batch · out features · in features · pairs of output and window positions that meet inside
    the input. XLA:TPU writes batched products as convolutions whose windows lie mostly over padding."""
    left, right, out = captured(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    lhs, rhs = (shape_of(o.type) for o in i.operands[:2])
    result = shape_of(i.type)
    fields = dict(re.findall(r"(\w+)=(\S+)", "".join(captured(r"window=\{([^}]*)\}", i.attributes))))

    def field(name: str, d: int, default: str) -> str:
        return fields[name].split("x")[d] if name in fields else default

    flops = 2.0 * result[out.index("b")] * result[out.index("f")] * rhs[right.index("i")]
    for d in range(len(out) - 2):
        low = int(field("pad", d, "0_0").split("_")[0])
        stride, dilation = int(field("stride", d, "1")), int(field("rhs_dilate", d, "1"))
        spread, base = int(field("lhs_dilate", d, "1")), lhs[left.index(str(d))]
        positions = (
            o * stride + k * dilation - low
            for o in range(result[out.index(str(d))])
            for k in range(int(field("size", d, "1")))
        )
        flops *= sum(0 <= p <= (base - 1) * spread and p % spread == 0 for p in positions)
    return flops


def _kernel(i: Instruction) -> float:
    """Operations of a Pallas kernel. Causal splash attention has two products forward, three for dq, four for dk and
    dv, over half of the scores. A grouped product takes every row once, with one matrix (`gmm`) or with a row of the
    other operand (`tgmm`)."""
    if i.name.startswith(("gmm", "tgmm")):
        rows = [dims for o in i.operands for _, dims, _ in arrays_of(o.type) if len(dims) == 2]
        width = rows[1][-1] if i.name.startswith("tgmm") else shape_of(i.type)[-1]
        return 2.0 * math.prod(rows[0]) * width
    products = next((n for name, n in _KERNEL_PRODUCTS.items() if i.name.startswith(name)), 0)
    arrays = [dims for o in i.operands for dtype, dims, _ in arrays_of(o.type) if len(dims) >= 3 and dtype != "s8"]
    if not products or not arrays:
        return 0.0
    queries = max(arrays, key=lambda dims: math.prod(dims[:-2]))
    keys = max(dims[-2] for dims in arrays)
    return products * 2 * math.prod(queries) * keys / 2


_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d\w+)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)(\(.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation: `name = type op(operands), attributes`; `root` marks the line of the computation's
    result. Names have no "%". For a parameter or constant, `attributes` begins with `op(`, as "parameter(0)". An
    operand that no line before defines has the type ""."""

    name: str
    type: str
    op: str
    operands: tuple[Instruction, ...]
    attributes: str
    root: bool

    def called(self, attribute: str) -> str:
        """The computation that the attribute `attribute` names, as "body" of a while; "" without the attribute."""
        return next(iter(captured(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)), "")


_UNKNOWN = Instruction("", "", "", (), "", False)


def computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Reads optimised HLO. Returns {computation's name: its instructions by name, in order}, and the name of the entry
    computation, "" if there is none. Other lines are skipped."""
    found: dict[str, dict[str, Instruction]] = {}
    entry = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = found[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, kind, op, rest = match.groups()
            names, _, attributes = rest.partition("), ")
            operands = tuple(current.get(o, _UNKNOWN) for o in re.findall(r"%([\w.\-]+)", names))
            attributes = op + rest if op in ("parameter", "constant") else attributes
            current[name] = Instruction(name, kind, op, operands, attributes, bool(root))
    return found, entry


def captured(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of the first match of a regular expression in `text`; () if there is none."""
    match = re.search(pattern, text)
    return match.groups() if match else ()


def uses_of(value: Instruction, body: Collection[Instruction]) -> Iterator[tuple[Instruction, int]]:
    """Yields each instruction of a computation `body` that reads the result `value`, and the index of the value among
    the operands. A reader of the value's bitcast counts as a reader of the value."""
    for x in body:
        for n, operand in enumerate(x.operands):
            if operand is value and x.op == "bitcast":
                yield from uses_of(x, body)
            elif operand is value:
                yield x, n


def arrays_of(kind: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields (dtype, shape, layout) of each array in the HLO type `kind`; the layout is "" if the type gives none."""
    for dtype, dims, layout in _ARRAY.findall(kind):
        yield dtype, tuple(int(d) for d in dims.split(",") if d), layout


def shape_of(kind: str) -> tuple[int, ...]:
    """The shape of the first array in the HLO type `kind`; () if there is no array."""
    return next(arrays_of(kind), ("", (), ""))[1]


def bytes_of(kind: str, everywhere: bool = False) -> float:
    """Bytes of the arrays of the HLO type `kind` in HBM, or with `everywhere` in any memory. Layout S(n) is not HBM."""
    total = 0.0
    for dtype, dims, layout in arrays_of(kind):
        bits = re.search(r"\d+", dtype)
        if everywhere or "S(" not in layout:
            total += (int(bits[0]) / 8 if bits else dtype == "pred") * math.prod(dims)
    return total


def replica_group_size(attributes: str) -> int:
    """Returns the number of devices in a replica group of a collective, by the attributes of its HLO; 2 if they give no
    groups. Raises ValueError if the groups are written in a form that is not known."""
    if iota := captured(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota[0])
    if listed := captured(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed[0].count(",") + 1
    if mesh := captured(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", attributes):  # as jaxlib 0.12 writes them
        sizes = dict(re.findall(r"'(.*?)'=(\d+)", mesh[0]))
        axes = re.findall(r"'(.*?)'(?::\(\d+\)(\d+))?", mesh[1])  # a part of an axis has its size
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if unknown := captured(r"replica_groups=(?!\{\})(.{,80})", attributes):
        raise ValueError(f"replica groups of this form cannot be read: {unknown[0]}")
    return 2
