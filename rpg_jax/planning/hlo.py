"""Operations, memory traffic and network traffic of a compiled program, counted from its optimised HLO text.

XLA's own cost analysis counts the body of a loop once and a Pallas kernel as nothing. Here a loop counts as often as
its condition says it runs, and the attention kernels count by their shapes. Loops without a constant bound count once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8}
_FREE = {"tuple", "get-tuple-element", "bitcast", "parameter", "constant", "while", "conditional", "call", "after-all"}
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d\w+)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_KERNEL_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}


@dataclasses.dataclass
class Costs:
    """Of one device.

    Attributes:
      flops: of matrix products and attention kernels.
      bytes: read from and written to HBM.
      collectives: bytes that a device receives, by kind, as a ring sends them.
    """

    flops: float = 0.0
    bytes: float = 0.0
    collectives: Counter = dataclasses.field(default_factory=Counter)

    def add(self, other: Costs, times: float = 1) -> None:
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        for kind, size in other.collectives.items():
            self.collectives[kind] += times * size


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def called(self, attribute: str) -> str | None:
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None


def count(text: str) -> Costs:
    """The costs of `compiled.as_text()`."""
    return _Counter(text).total()


class _Counter:
    def __init__(self, text: str):
        self.computations: dict[str, list[_Instruction]] = {}
        self.done: dict[str, Costs] = {}
        self.entry = ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations[header[2]] = []
                self.entry = header[2] if header[1] else self.entry
            elif match := _INSTRUCTION.match(line):
                current.append(_parse(match[2], match[3], bool(match[1])))

    def total(self) -> Costs:
        return self.of(self.entry)

    def of(self, name: str) -> Costs:
        """Costs of one run of a computation and of all that it calls."""
        if name not in self.done:
            self.done[name] = costs = Costs()
            types = {i.name: i.type for i in self.computations[name]}
            for instruction in self.computations[name]:
                costs.add(self._instruction(instruction, types))
        return self.done[name]

    def _instruction(self, i: _Instruction, types: dict[str, str]) -> Costs:
        costs = Costs()
        if i.op == "while":
            body, condition = i.called("body"), i.called("condition")
            costs.add(self.of(body), self._trips(condition))
        elif i.op == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
            names = branches[1].replace("%", "").split(", ") if branches else []
            names += filter(None, (i.called("true_computation"), i.called("false_computation")))
            costs.add(max((self.of(n) for n in names), key=lambda c: c.bytes + c.flops, default=Costs()))
        elif i.op in ("call", "call-start") and i.called("to_apply"):
            costs.add(self.of(i.called("to_apply")))
        elif i.op in ("fusion", "async-start", "call-start"):
            inner = self.of(i.called("calls"))
            kinds = inner.collectives
            if "reduce-scatter" in (i.called("calls") or "") and kinds["all-reduce"]:
                kinds = Counter({**kinds, "reduce-scatter": kinds["reduce-scatter"] + kinds["all-reduce"] / 2})
                del kinds["all-reduce"]
            costs.add(Costs(inner.flops, self._fusion_bytes(i, types), kinds))
        else:
            kind = i.op.removesuffix("-start")
            if kind in COLLECTIVES:
                sizes = sum(_size(types.get(o, ""), everywhere=True) for o in i.operands)
                costs.collectives[kind] += sizes * _received(kind, _group(i.attributes))
            costs.flops = _flops(i, types)
            costs.bytes = self._bytes(i, types)
        return costs

    def _trips(self, condition: str | None) -> int:
        """How often a loop from 0 runs that compares its counter with a constant; 1 where it does not."""
        instructions = self.computations.get(condition or "", [])
        compares = [i for i in instructions if i.op in ("compare", "fusion")]
        bounds = [
            int(match[1])
            for i in instructions
            if i.op == "constant" and (match := re.match(r"constant\((\d+)\)", i.attributes))
        ]
        return max(bounds) if len(compares) == 1 and bounds else 1

    def _bytes(self, i: _Instruction, types: dict[str, str]) -> float:
        if i.op in _FREE or i.op.endswith("-done") or 'custom_call_target="AllocateBuffer"' in i.attributes:
            return 0
        sizes = [_size(types.get(o, "")) for o in i.operands]
        if i.op == "custom-call" and i.name.startswith("ragged_"):
            return _ragged_bytes(i, types)
        if i.op in ("dynamic-slice", "gather"):
            return 2 * _size(i.type)
        if i.op in ("dynamic-update-slice", "scatter"):
            return 2 * sum(sizes[1:2])
        if i.op.endswith("-start"):  # its type repeats the operands
            return 2 * sum(sizes) if i.op == "copy-start" else sum(sizes)
        return sum(sizes) + _size(i.type)

    def _sliced(self, name: str, number: int) -> float | None:
        """Bytes that a fused computation reads of a parameter that it only slices or updates; None: all of it."""
        body = self.computations[name]
        (parameter,) = (x for x in body if x.op == "parameter" and x.attributes.startswith(f"parameter({number})"))
        total = 0.0
        for use, operand in _uses(parameter.name, body):
            if use.op in ("dynamic-slice", "gather") and operand == 0:
                total += _size(use.type, everywhere=True)
            elif use.op == "fusion" and (part := self._sliced(use.called("calls"), operand)) is not None:
                total += part
            elif use.op != "dynamic-update-slice" or operand != 0:
                return None
        return total

    def _fusion_bytes(self, i: _Instruction, types: dict[str, str]) -> float:
        """Operands and results; of an array that is only sliced or updated in place, the slice."""
        name = i.called("calls")
        body = self.computations[name]
        by_name = {x.name: x for x in body}
        total = sum(
            _size(types.get(operand, "")) if (part := self._sliced(name, n)) is None else part
            for n, operand in enumerate(i.operands)
        )
        root = next(x for x in body if x.root)
        for part in [by_name[o] for o in root.operands] if root.op == "tuple" else [root]:
            written = part.type
            while part.op in ("bitcast", "copy", "convert") and part.operands:
                part = by_name[part.operands[0]]
            if part.op == "dynamic-update-slice":
                written = by_name[part.operands[1]].type
            total += _size(written)
        return total


def _uses(name: str, body: list[_Instruction]) -> Iterator[tuple[_Instruction, int]]:
    """What reads a value, through bitcasts, and as which operand."""
    for x in body:
        for n, operand in enumerate(x.operands):
            if operand == name and x.op == "bitcast":
                yield from _uses(x.name, body)
            elif operand == name:
                yield x, n


def _parse(name: str, rest: str, root: bool) -> _Instruction:
    cut = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:cut], rest[cut:].lstrip()
    op = rest[: rest.index("(")]
    end = _closing(rest[len(op) :]) + len(op)
    inside = rest[len(op) : end + 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    keep = rest if op in ("parameter", "constant") else rest[end + 1 :]
    return _Instruction(name, kind, op, operands, keep, root)


def _closing(text: str) -> int:
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i
    return len(text) - 1


def _arrays(kind: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for dtype, dims, layout in _ARRAY.findall(kind):
        yield dtype, tuple(int(d) for d in dims.split(",") if d), layout


def _size(kind: str, everywhere: bool = False) -> float:
    """Bytes of a type's arrays in HBM (a layout with S(n) lies elsewhere), or `everywhere`."""
    total = 0.0
    for dtype, dims, layout in _arrays(kind):
        width = _BYTES.get(dtype) or (int(match[0]) / 8 if (match := re.search(r"\d+", dtype)) else 0)
        if everywhere or "S(" not in layout:
            total += width * math.prod(dims)
    return total


def _group(attributes: str) -> int:
    """Devices of one replica group."""
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return match[1].count(",") + 1
    return 2


def _received(kind: str, group: int) -> float:
    """Bytes that reach a device per byte that it puts in."""
    share = (group - 1) / group
    return {"all-gather": group - 1, "all-reduce": 2 * share, "collective-permute": 1}.get(kind, share)


def _ragged_bytes(i: _Instruction, types: dict[str, str]) -> float:
    """The decode kernels are given the cache of all layers: attention reads one of them, taken as full, and the write
    of a token moves tiles too small to count."""
    total = _size(i.type) if i.name.startswith("ragged_attention") else 0.0
    for operand in i.operands:
        kind = types.get(operand, "")
        dims = next(_arrays(kind))[1] if kind else ()
        if len(dims) < 5:
            total += _size(kind)
        elif i.name.startswith("ragged_attention"):
            total += _size(kind) / dims[0]
    return total


def _flops(i: _Instruction, types: dict[str, str]) -> float:
    if i.op == "dot":
        lhs = next(_arrays(types[i.operands[0]]))[1]
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
        return 2 * math.prod(next(_arrays(i.type))[1]) * math.prod(lhs[int(d)] for d in contracted[1].split(",") if d)
    if i.op == "convolution":
        return _convolution(i, types)
    if i.op == "custom-call" and "tpu_custom_call" in i.attributes:
        return _kernel(i, types)
    return 0.0


def _convolution(i: _Instruction, types: dict[str, str]) -> float:
    """2 · out batch · out features · in features · pairs of output and window positions that meet inside the input.

    XLA:TPU writes batched products as convolutions whose windows reach mostly into padding.
    """
    left, right, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes).groups()
    lhs, rhs = (next(_arrays(types[o]))[1] for o in i.operands[:2])
    result = next(_arrays(i.type))[1]
    window = re.search(r"window=\{([^}]*)\}", i.attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}

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


def _kernel(i: _Instruction, types: dict[str, str]) -> float:
    """Causal splash attention: two products forward, three for dq and four for dk and dv, over half of the scores.
    Grouped products: every row once, with one matrix (`gmm`), or with a row of the other operand (`tgmm`)."""
    if i.name.startswith(("gmm", "tgmm")):
        rows = [dims for o in i.operands for _, dims, _ in _arrays(types[o]) if len(dims) == 2]
        width = rows[1][-1] if i.name.startswith("tgmm") else next(_arrays(i.type))[1][-1]
        return 2.0 * math.prod(rows[0]) * width
    products = next((n for name, n in _KERNEL_PRODUCTS.items() if i.name.startswith(name)), 0)
    arrays = [
        dims for o in i.operands for dtype, dims, _ in _arrays(types.get(o, "")) if len(dims) >= 3 and dtype != "s8"
    ]
    if not products or not arrays:
        return 0.0
    queries = max(arrays, key=lambda dims: math.prod(dims[:-2]))
    keys = max(dims[-2] for dims in arrays)
    return products * 2 * math.prod(queries) * keys / 2
