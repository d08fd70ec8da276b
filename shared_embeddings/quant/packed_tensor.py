"""A tensor that stays compressed in memory (`PackedTensor`), and modules with such tensors.

Axes: ``V`` rows of a matrix, ``R`` width of a matrix, ``N`` hidden states or ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from shared_embeddings.quant.formats import FORMATS, NumberFormat, Packed
from shared_embeddings.utils.errors import UserError

# A matrix is decoded in blocks of this many values for a product, so that it is never in memory as a whole.
_VALUES_AT_ONCE = 2**19
_aten = torch.ops.aten


class PackedTensor(Tensor):
    """A frozen tensor in the codes of a `NumberFormat`; it behaves like the decoded tensor.

    Looking up rows decodes only these rows, and products with the transposed matrix decode one block of rows
    at a time. Other operations decode the whole tensor. There are no gradients, and only another packed
    tensor can be copied into it.

    Args:
        form: of the codes.
        packed: the codes and scales, see `NumberFormat.check`.
        dtype: the dtype that the tensor reports; codes and scales do not depend on it.
        is_transposed: whether the tensor is the transposed matrix.
    """

    form: NumberFormat
    packed: Packed
    codes: Tensor
    scales: Tensor | None
    is_transposed: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        form: NumberFormat,
        packed: Packed,
        dtype: torch.dtype = torch.float32,
        is_transposed: bool = False,
    ) -> PackedTensor:
        """A tensor without its own memory."""
        shape = form.shape[::-1] if is_transposed else form.shape
        strides = (1, form.shape[-1]) if is_transposed else None
        # Views of tensors that were made outside of inference mode must not be inference tensors.
        with torch.inference_mode(False):
            made: PackedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, shape, strides=strides, dtype=dtype, device=packed.codes.device, requires_grad=False
            )
        made.form, made.packed, made.is_transposed = form, packed, is_transposed
        made.codes, made.scales = packed
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The storage and the shape."""
        return f"PackedTensor({self.form.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def decoded(self) -> Tensor:
        """The plain tensor."""
        values = self.form.decode(self.packed).contiguous().to(self.dtype)
        return values.t() if self.is_transposed else values

    def mapped(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> PackedTensor:
        """A tensor with changed codes and scales of the same sizes, such as on another device."""
        codes, scales = self.packed
        packed = Packed(change(codes), None if scales is None else change(scales))
        return PackedTensor(self.form, packed, dtype or self.dtype, self.is_transposed)

    def scores(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The products ``(N, V)`` of hidden states ``(N, R)`` with all rows, in blocks, written to `out`.

        Raises:
            RuntimeError: the hidden states have another width.
        """
        states = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        scores = hidden.new_empty(hidden.size(0), self.form.shape[0]) if out is None else out
        for block, part in self._parts():
            scores[:, block] = self.form.scores(states, part)
        return scores

    def sums(self, weights: Tensor) -> Tensor:
        """The products ``(N, R)`` of weights ``(N, V)`` with the matrix, decoded in blocks."""
        if weights.size(1) != self.form.shape[0]:
            raise RuntimeError(f"{tuple(weights.shape)} and {self.form.shape} cannot be multiplied")
        kind = torch.promote_types(weights.dtype, torch.float32)
        sums = weights.new_zeros((len(weights), self.form.shape[1]), dtype=kind)
        for block, part in self._parts():
            sums.addmm_(weights[:, block].to(kind), self.form.decode(part).to(kind))
        return sums.to(weights.dtype)

    def _parts(self) -> Iterator[tuple[slice, Packed]]:
        """Blocks of rows, with their codes and scales."""
        rows = self.form.shape[0]
        step = max(1, _VALUES_AT_ONCE * rows // max(1, self.numel()))
        for start in range(0, rows, step):
            block = slice(start, min(start + step, rows))
            yield block, self.form.rows_of(self.packed, itemgetter(block))

    # torch's protocol for tensor subclasses.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on packed tensors, see the class."""
        named = dict(kwargs or {})
        handler = _HANDLERS.get(func)
        if handler is not None and (result := handler(*args, **named)) is not NotImplemented:
            return result
        # In inference mode, torch does not resolve composed operations such as `linear` before.
        if (result := func.decompose(*args, **named)) is not NotImplemented:
            return result
        changed = [
            value
            for argument, value in zip(func._schema.arguments, args)
            if argument.alias_info and argument.alias_info.is_write
        ]
        if func._schema.is_mutable and any(isinstance(value, PackedTensor) for value in changed):
            raise RuntimeError(
                f"a packed tensor is frozen, but {func} would change it: load the model with trainable=True"
            )
        # As in `__new__`.
        with torch.inference_mode(False) if func.is_view else contextlib.nullcontext():
            args, named = tree_map_only(PackedTensor, PackedTensor.decoded, (args, named))
            return func(*args, **named)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """The names of the plain tensors inside, and everything else."""
        names = ["codes"] if self.scales is None else ["codes", "scales"]
        return names, (self.form.name, self.form.shape, self.form.widths, self.dtype, self.is_transposed)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> PackedTensor:
        """The inverse of `__tensor_flatten__`."""
        name, shape, widths, dtype, is_transposed = context
        packed = Packed(inner["codes"], inner.get("scales"))
        return PackedTensor(FORMATS[name](shape, widths), packed, dtype, is_transposed)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedTensor:
        """A tensor with its own memory, a parameter if this is one."""
        copied = self.mapped(torch.clone)
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name == "_is_param"})
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the codes, from which `restore` rebuilds the tensor."""
        is_parameter = isinstance(self, nn.Parameter)
        content = (self.form.name, self.form.shape, *self.packed, self.dtype, self.is_transposed)
        return restore, (*content, is_parameter, self.form.widths)


def restore(
    name: str,
    shape: Sequence[int],
    codes: Tensor,
    scales: Tensor | None,
    dtype: torch.dtype,
    is_transposed: bool,
    is_parameter: bool,
    widths: Sequence[int] = (),
) -> Tensor:
    """Rebuild an unpickled tensor; ``torch.load(weights_only=True)`` may call this.

    Raises:
        ValueError: the parts do not belong together.
    """
    form, packed = FORMATS[name](shape, widths), Packed(codes, scales)
    form.check(packed)
    tensor = PackedTensor(form, packed, dtype, is_transposed)
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


torch.serialization.add_safe_globals([restore])


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the memory of a tensor: itself, or codes and scales."""
    if isinstance(tensor, PackedTensor):
        yield from (part for part in tensor.packed if part is not None)
    else:
        yield tensor


def column_sums(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum ``(R,)`` of the rows of a matrix; that of a packed one is kept until its codes change."""
    if not isinstance(matrix, PackedTensor):
        return matrix.sum(dim=0, dtype=dtype)
    codes = matrix.codes
    can_be_kept = type(codes) is Tensor and not (codes.is_inference() or torch.compiler.is_compiling())
    state = (codes._version, dtype, matrix.dtype) if can_be_kept else None
    kept_state, sums = _column_sums.get(codes, (None, None))
    if sums is None or state is None or kept_state != state:
        sums = matrix.sums(torch.ones(1, len(matrix), dtype=dtype, device=codes.device))[0]
        if state is not None:
            _column_sums[codes] = state, sums
    return sums


_column_sums: WeakIdKeyDictionary = WeakIdKeyDictionary()


def dense(tensor: Tensor) -> Tensor:
    """A tensor itself, or the decoded one."""
    return tensor.decoded() if isinstance(tensor, PackedTensor) else tensor


# Operations that keep the codes or decode only what they need; NotImplemented decodes the whole tensor.


def _to_copy(tensor: PackedTensor, **settings: Any) -> Any:
    dtype = settings.get("dtype") or tensor.dtype
    if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
        return NotImplemented
    device = settings.get("device") or tensor.device
    return tensor.mapped(lambda part: part.to(device, copy=True), dtype)


def _copy(tensor: Tensor, source: Tensor, *others: Any) -> Any:
    if not (isinstance(tensor, PackedTensor) and isinstance(source, PackedTensor)):
        return NotImplemented
    keys = [
        (part.form.name, part.form.shape, part.form.widths, part.is_transposed) for part in (tensor, source)
    ]
    if keys[0] != keys[1]:
        return NotImplemented
    for part, new in zip(inner_tensors(tensor), inner_tensors(source)):
        part.copy_(new)
        if not part.is_inference():  # torch does not count changes at this level
            torch.autograd.graph.increment_version(part)
    return tensor


def _transpose(tensor: PackedTensor, *axes: Any) -> Any:
    """For `t`, `transpose` with two axes, and `permute` with a list of them."""
    is_permuted = bool(axes) and isinstance(axes[0], Sequence)
    order = [axis % 2 for axis in (axes[0] if is_permuted else axes)]
    if tensor.dim() != 2 or order not in ([[1, 0]] if is_permuted else [[], [0, 1], [1, 0]]):
        return NotImplemented
    return PackedTensor(tensor.form, tensor.packed, tensor.dtype, not tensor.is_transposed)


def _slice(tensor: PackedTensor, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if axis != 0 or step != 1 or tensor.is_transposed or tensor.form.widths:
        return NotImplemented
    first, last, _ = slice(start, end).indices(tensor.size(0))
    rows = slice(first, max(first, last))
    form = type(tensor.form)((rows.stop - first, *tensor.form.shape[1:]))
    return PackedTensor(form, tensor.form.rows_of(tensor.packed, itemgetter(rows)), tensor.dtype)


def _embedding(tensor: Any, ids: Tensor, *others: Any) -> Any:
    if not isinstance(tensor, PackedTensor) or tensor.is_transposed or tensor.dim() != 2:
        return NotImplemented
    rows = tensor.form.decode_rows(tensor.packed, ids.reshape(-1)).to(tensor.dtype)
    return rows if ids.dim() == 1 else rows.unflatten(0, ids.shape)


def _select(tensor: PackedTensor, axis: int, place: Any) -> Any:
    """For `select` of one row, and `index_select` of ids."""
    if axis != 0 or not isinstance(tensor, PackedTensor) or tensor.is_transposed:
        return NotImplemented
    if isinstance(place, Tensor):
        return tensor.form.decode_rows(tensor.packed, dense(place)).to(tensor.dtype)
    if not -len(tensor) <= place < len(tensor):
        return NotImplemented
    with torch.inference_mode(False):  # as in `PackedTensor.__new__`
        ids = torch.tensor([place % len(tensor)], device=tensor.device)
        return tensor.form.decode_rows(tensor.packed, ids)[0].to(tensor.dtype)


def _mm(first: Any, second: Any, *, out: Tensor | None = None) -> Any:
    if isinstance(first, PackedTensor) or isinstance(out, PackedTensor):
        return NotImplemented
    if second.is_transposed:
        return second.scores(first, out)
    sums = second.sums(first)
    return sums if out is None else out.copy_(sums)


def _addmm(bias: Any, first: Any, second: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    is_plain = beta == 1 and alpha == 1
    scores = _mm(first, second) if is_plain and isinstance(second, PackedTensor) else NotImplemented
    return scores if scores is NotImplemented else scores.add_(dense(bias))


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: lambda tensor, **settings: tensor.mapped(lambda part: part),
    _aten.alias.default: lambda tensor, **settings: tensor.mapped(lambda part: part),
    _aten.clone.default: lambda tensor, **settings: tensor.mapped(torch.clone),
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _transpose,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.index_select.default: _select,
    _aten.embedding.default: _embedding,
    _aten.mm.default: _mm,
    _aten.mm.out: _mm,
    _aten.addmm.default: _addmm,
}


def install(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put the packed tensors of a state in place of a module's own, frozen, wherever the module uses them.

    Real numbers take the dtype of those that they replace, so that all of an embedding have the same.

    Args:
        module: the module.
        state: its state.

    Returns:
        The rest of the state.

    Raises:
        UserError: a packed tensor has another shape.
    """
    present = module.state_dict(keep_vars=True)
    packed = {name: tensor for name, tensor in state.items() if isinstance(tensor, PackedTensor)}
    for name, tensor in packed.items():
        if tensor.shape != present[name].shape:
            raise UserError(
                f"the packed tensor {name} is {tuple(tensor.shape)}, but the settings of the model take "
                f"{tuple(present[name].shape)}; the file is damaged"
            )
    _replace(module, {id(present[name]): new.to(present[name].dtype) for name, new in packed.items()})
    return {name: tensor for name, tensor in state.items() if not isinstance(tensor, PackedTensor)}


def unfreeze(module: nn.Module) -> None:
    """Make the packed tensors of a module plain ones, and those that are parameters trainable."""
    tensors = (*module.parameters(), *module.buffers())
    with torch.no_grad():
        _replace(module, {id(old): old.decoded() for old in tensors if isinstance(old, PackedTensor)})


def _replace(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Replace parameters and buffers, given the new ones by the id of the old."""
    parameters = {
        key: nn.Parameter(tensor, requires_grad=not isinstance(tensor, PackedTensor))
        for key, tensor in new.items()
        if tensor.is_floating_point()
    }
    for part in module.modules():
        for parameter, old in part._parameters.items():
            part._parameters[parameter] = parameters.get(id(old), old)
        for buffer, value in part._buffers.items():
            part._buffers[buffer] = new.get(id(value), value)
