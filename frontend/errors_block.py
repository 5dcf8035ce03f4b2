"""Mistakes in the use of tensor descriptors and block pointers."""

from __future__ import annotations

from minitriton.frontend.errors import Mistake


class NotBlockPointer(Mistake):
    pointer: str
    title = "boundary_check and padding_option belong to block pointers; this is a {pointer}"
    help = "use mask=... and other=..., or make a block pointer with tl.make_block_ptr"


class BlockPointerMask(Mistake):
    title = "a block pointer takes no mask and no other"
    help = "name the dimensions that may leave the array, e.g. boundary_check=(0, 1)"


class BoundaryDimension(Mistake):
    dim: int
    rank: int
    title = "boundary_check names dimension {dim} of a block of rank {rank}"
    help = "dimensions are 0 to {last}"

    @property
    def last(self) -> int:
        return self.rank - 1


class NanPadding(Mistake):
    element: str
    title = "padding with NaN is for floats, not for {element}"
    help = 'use padding_option="zero"'


class DescriptorAsPointer(Mistake):
    what: str
    value: str
    title = "{what} needs a pointer, not a {value}"
    help = "use its methods: desc.load([i, j]), desc.store([i, j], value)"


class WindowIndex(Mistake):
    value: str
    title = "a {value} cannot be indexed"
    help = "give the indices to its load, or move a block pointer with tl.advance"


class NotDescriptor(Mistake):
    function: str
    expected: str
    value: str
    title = "{function} needs a {expected}, not {value}"


class StoredShape(Mistake):
    value: str
    target: str
    title = "{value} does not have the shape of the {target}"
    help = "reshape or broadcast it to the block's shape"


class StoredType(Mistake):
    value: str
    target: str
    element: str
    title = "a value of {value} for the {target}: the types of the elements differ"
    help = "cast it with .to({element})"


class BlockLength(Mistake):
    what: str
    count: int
    rank: int
    title = "{what} has {count} entries for {rank} dimension(s)"
    help = "give one for each dimension"


class BlockRank(Mistake):
    rank: int
    title = "a tensor descriptor has 1 to 5 dimensions, not {rank}"
    help = "merge dimensions, or use plain pointers"


class BlockBase(Mistake):
    function: str
    value: str
    title = "the base of {function} must be a pointer to one element, not {value}"


class BlockScalar(Mistake):
    what: str
    value: str
    expected: str = "an integer: a constant or a scalar"
    title = "{what} must be {expected}, not {value}"


class WideOffset(Mistake):
    what: str
    value: str
    title = "{what} must be a 32-bit integer, not {value}"
    help = "cast it with .to(tl.int32), or move the base pointer: base + offset"


class LastStride(Mistake):
    value: str
    title = "the last stride of a tensor descriptor must be the constant 1, not {value}"
    help = "elements of the last dimension lie one after the other; permute the dimensions"


class StrideBytes(Mistake):
    stride: int
    element: str
    title = "a stride of {stride} elements of {element} is no multiple of 16 bytes"
    help = "pad the rows of the array, or use plain pointers"


class BlockBytes(Mistake):
    count: int
    element: str
    bytes: int
    title = "the last dimension of a block must have 16 bytes; {count} of {element} are {bytes}"
    help = "use a larger last block dimension"


class NegativeSize(Mistake):
    size: int
    title = "the shape of an array cannot have a negative size ({size})"


class OrderPermutation(Mistake):
    order: str
    rank: int
    title = "order must be a permutation of 0 to {last}, not {order}"

    @property
    def last(self) -> int:
        return self.rank - 1


class GatherBlock(Mistake):
    function: str
    block: str
    title = "{function} needs a descriptor whose blocks are one row, not blocks of shape {block}"
    help = "make the descriptor with block_shape=[1, columns]"


class GatherRows(Mistake):
    function: str
    value: str
    title = "{function} takes a tile of 8 or more row indices of up to 32 bits, not {value}"


class GatherColumns(Mistake):
    function: str
    columns: int
    element: str
    minimum: int
    title = "{function} of {element} needs blocks of at least {minimum} columns, not {columns}"
