"""Bytes that each kernel of an optimised program reads and writes, counted from its HLO.

XLA's fusions are kernels, and what lies between two of them goes through memory. So the arrays
that they name are the traffic, caches aside: that is enough to tell what a kernel of our own could
save, on a machine without a GPU.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_BITS = {
    **dict.fromkeys(("s4", "u4"), 4),
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64"), 64),
}

# They move nothing.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}

# They read as much of their first operand as they give.
_PARTIAL_READS = {"slice", "dynamic-slice", "gather"}
# They change their first operand in place; which operand is what they write.
_UPDATES = {"scatter": 2, "dynamic-update-slice": 1}


class Traffic(NamedTuple):
    """What one kernel moves.

    Attributes:
      name: of its instruction in HLO.
      read_bytes: of the arrays it takes; of an array that it slices or gathers from, what it takes.
      written_bytes: of the arrays it gives; of an array that it updates, what is new. What a custom
        call reads or writes of an array that it updates is not known, and not counted.
    """

    name: str
    read_bytes: int
    written_bytes: int


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: Sequence[str]
    attributes: str

    @property
    def size(self) -> int:
        """Bytes of its result."""
        return sum(array_bytes(self.shape))

    @property
    def updated_operands(self) -> set[int]:
        """Which operands become a result, in place."""
        if self.opcode in _UPDATES:
            return {0}
        # Such as output_to_operand_aliasing={{0}: (4, {}), {1}: (5, {})}.
        _, _, aliases = self.attributes.partition("output_to_operand_aliasing={")
        pairs = re.match(r"(?:\{[\d, ]*\}: \(\d+, \{[\d, ]*\}\)(?:, )?)*", aliases)
        assert pairs is not None, "it matches nothing, at least"
        return {int(index) for index in re.findall(r": \((\d+),", pairs[0])}


class _Computation(NamedTuple):
    instructions: Mapping[str, _Instruction]  # by name, in order
    root: str

    def results(self, name: str) -> Iterator[_Instruction]:
        """Yield what computes the arrays of an instruction's value."""
        instruction = self.instructions[name]
        if instruction.opcode in ("bitcast", "tuple"):
            for operand in instruction.operands:
                yield from self.results(operand)
        else:
            yield instruction


def kernel_traffic(hlo: str) -> list[Traffic]:
    """Return the kernels of a program's entry computation, in order, and what they move.

    A loop or a branch is counted as one kernel, which reads its operands whole.

    Args:
      hlo: an optimised program, as `Report.hlo` has it.
    """
    computations = _parse(hlo)
    kernels = []
    for kernel in computations["ENTRY"].instructions.values():
        if kernel.opcode in _FREE:
            continue
        called = re.search(r"\bcalls=%?([\w.-]+)", kernel.attributes)
        body = computations[called[1]] if called else _alone(kernel, computations["ENTRY"])
        written = sum(_written_bytes(body, result) for result in body.results(body.root))
        kernels.append(Traffic(kernel.name, _read_bytes(body), written))
    return kernels


def array_bytes(shape: str) -> list[int]:
    """Return the sizes of the arrays in a shape of HLO, which may be a tuple."""
    return [
        math.prod(int(dim) for dim in dims.split(",") if dim)
        * _BITS.get(kind, 8 if kind.startswith("f8") else 0)
        // 8
        for kind, dims in re.findall(r"\b(\w+)\[([\d,]*)\]", shape)
    ]


def _read_bytes(body: _Computation) -> int:
    """Return how much of the parameters is needed; caches see to it that it is read once."""
    # Users come after what they use, so one walk from the end knows how much each is needed.
    needed = dict.fromkeys(body.instructions, 0.0) | {body.root: 1.0}
    for user in reversed(list(body.instructions.values())):
        share = min(needed[user.name], 1.0)
        for index, name in enumerate(user.operands):
            if index in user.updated_operands:
                continue
            if index == 0 and user.opcode in _PARTIAL_READS:
                needed[name] += share * user.size / body.instructions[name].size
            else:
                needed[name] += share
    return sum(
        round(min(needed[each.name], 1.0) * each.size)
        for each in body.instructions.values()
        if each.opcode == "parameter"
    )


def _written_bytes(body: _Computation, result: _Instruction) -> int:
    if result.opcode in _UPDATES:
        return body.instructions[result.operands[_UPDATES[result.opcode]]].size
    # A tuple's part that is updated in place has its operand's size.
    updated = sum(
        body.instructions[result.operands[index]].size for index in result.updated_operands
    )
    return result.size - updated


def _alone(kernel: _Instruction, entry: _Computation) -> _Computation:
    """Return a computation that is one instruction, and its operands as parameters."""
    parameters = {
        name: entry.instructions[name]._replace(opcode="parameter", operands=())
        for name in kernel.operands
    }
    return _Computation({**parameters, kernel.name: kernel}, kernel.name)


def _parse(hlo: str) -> dict[str, _Computation]:
    """Return the computations by name; the entry is called "ENTRY"."""
    computations: dict[str, _Computation] = {}
    name, instructions = "", dict[str, _Instruction]()
    for line in hlo.splitlines():
        header = re.match(r"(?:(ENTRY) )?%?([\w.-]+) \(.*\{$", line)
        if header:
            name, instructions = header[1] or header[2], {}
        match = re.match(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*?)\)(.*)", line)
        if match is None:
            continue
        is_root, result, shape, opcode, operands, attributes = match.groups()
        # An index stands as a comment before every fifth operand.
        names = re.findall(r"(?:^|[ %])([\w.-]+)(?=,|$)", operands)
        if opcode in ("parameter", "constant"):
            names = []
        instructions[result] = _Instruction(result, shape, opcode, names, attributes)
        if is_root:
            computations[name] = _Computation(instructions, result)
    return computations
