"""Checks of the arguments of public functions and classes against their annotations.

`checked` reads a signature: ``steps: AtLeastOne``, ``heads: Sequence[tuple[int, int]]`` or
``tokens: Int[Tensor, "batch pos"]`` says what is accepted. A text is not a number, 2.0 is not a
whole number, NaN is not a number, and a text is not a list of texts. Axes of the same name must
have the same size in all arguments of a call. NumPy's numbers become Python's, and tensors of whole
numbers int64; nothing else is converted.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import jaxtyping
import numpy as np
import torch
from torch import Tensor

from sparse_tl.calls.out_of_memory import batches_too_large, is_out_of_memory
from sparse_tl.calls.ranges import (
    MOST as MOST,
    AtLeastOne as AtLeastOne,
    Count as Count,
    Fraction as Fraction,
    Logit as Logit,
    NotNegative as NotNegative,
    Positive as Positive,
    Seed as Seed,
    Share as Share,
)
from sparse_tl.calls.wording import WORDS, in_words, is_array, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

_OTHER_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)

Kind = TypeVar("Kind", bound=Callable[..., Any])


def checked(target: Kind) -> Kind:
    """Check the arguments of a function, or of a class's constructor and public methods.

    Raises:
        TypeError: from the decorated function: an argument has the wrong type.
        ValueError: an argument has the right type but is out of range, or sizes do not match.
        MemoryError: a function with a `batch_size` ran out of memory.
    """
    if isinstance(target, type):
        owner: Any = target
        owner.__init__ = _checked_function(owner.__init__, owner.__name__)
        for name, method in list(vars(owner).items()):
            kind = type(method) if isinstance(method, staticmethod | classmethod) else None
            plain = method.__func__ if kind else method
            defined = inspect.isfunction(plain) and plain.__qualname__.startswith(
                owner.__qualname__
            )
            if defined and not name.startswith("_"):
                wrapped = _checked_function(plain, f"{owner.__name__}.{name}")
                setattr(owner, name, kind(wrapped) if kind else wrapped)
        return owner
    return _checked_function(target, target.__name__)


def _checked_function(function: Any, name: str) -> Any:
    signature = inspect.signature(function)
    annotations = functools.cache(functools.partial(_annotations, function, signature))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        accepted = annotations()
        args = tuple(_plain_number(value) for value in args)
        kwargs = {key: _plain_number(value) for key, value in kwargs.items()}
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}; see help({name})") from None
        given = bound.arguments
        # Axis sizes are bound in this call only, not in an enclosing one.
        with jaxtyping.jaxtyped("context"):  # type: ignore[call-overload]
            for parameter in filter(accepted.__contains__, given):
                given[parameter] = _int64(given[parameter], accepted[parameter][0])
                _check(name, parameter, given, *accepted[parameter])
        try:
            return function(*bound.args, **bound.kwargs)
        except RuntimeError as error:
            batch_size = inspect.signature(call).parameters.get("batch_size")
            if batch_size is None or not is_out_of_memory(error):
                raise
            size = {**given, **kwargs}.get("batch_size", batch_size.default)
            raise batches_too_large(name, size, error) from error

    return call


def _plain_number(value: Any) -> Any:
    """NumPy scalars as Python numbers: a size from an array is also a whole number."""
    return value.item() if isinstance(value, np.generic) else value


def _int64(value: Any, annotation: Any) -> Any:
    """A tensor of whole numbers as int64, the only kind that all operations of PyTorch take."""
    if not isinstance(value, Tensor) or value.dtype not in _OTHER_INTEGERS:
        return value
    kinds = {getattr(kind, "dtype", None) for kind in _kinds(annotation)}
    # Where masks are accepted too, a tensor of bytes could be one.
    return value.long() if jaxtyping.Int in kinds and jaxtyping.Bool not in kinds else value


def _annotations(function: Any, signature: inspect.Signature) -> dict[str, Any]:
    """Each parameter's annotation and its pydantic validator; omits those that accept anything.

    Names that are imported only for type checkers cannot be resolved; the function itself checks
    such parameters.
    """
    from pydantic import ConfigDict, TypeAdapter

    scope = inspect.unwrap(function).__globals__
    rules = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    accepted: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        annotation = parameter.annotation
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if annotation is parameter.empty or several or name in ("self", "cls"):
            continue
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, scope)  # source code of this package, never input
            except NameError:
                continue
        if annotation is not Any:
            accepted[name] = (annotation, TypeAdapter(_instances(annotation), config=rules))
    return accepted


def _instances(annotation: Any) -> Any:
    """The annotation with `isinstance` checks in place of classes, whose fields are not checked."""
    from pydantic import BeforeValidator

    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Annotated[(_instances(inside[0]), *annotation.__metadata__)]  # type: ignore[invalid-annotation]
    if origin in (Union, UnionType):
        kinds = tuple(_instances(kind) for kind in inside)
        return Union[kinds]  # type: ignore[invalid-annotation] # noqa: UP007 - made from a list
    if origin is Literal or annotation in WORDS:
        return annotation
    if origin is None:
        return _instance(annotation) if isinstance(annotation, type) else annotation
    if issubclass(origin, Callable):
        return Callable
    if origin is Iterable:  # its members are checked when they are read
        return Annotated[_instance(Iterable), _but_not(str, bytes)]  # type: ignore[invalid-annotation]
    members = tuple(kind if kind is Ellipsis else _instances(kind) for kind in inside)
    generic: Any = origin
    if origin is tuple or origin is Sequence:  # [layer, head] as (layer, head), a range as a list
        return Annotated[generic[members], BeforeValidator(_as_tuple)]
    return generic[members]


def _instance(kind: type) -> Any:
    from pydantic import GetPydanticSchema
    from pydantic_core.core_schema import is_instance_schema

    schema = GetPydanticSchema(lambda source, handler: is_instance_schema(kind))
    return Annotated[Any, schema, _but_not(type)]  # a class has the methods of its instances


def _but_not(*kinds: type) -> Any:
    """Refuse values that pass as instances by accident: a text as its characters, or a class."""
    from pydantic import AfterValidator

    def check(value: Any) -> Any:
        if isinstance(value, kinds):
            raise ValueError
        return value

    return AfterValidator(check)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | range) else value


def _check(
    name: str, parameter: str, given: dict[str, Any], annotation: Any, accepts: TypeAdapter
) -> None:
    from pydantic import ValidationError

    value = given[parameter]
    try:
        accepts.validate_python(value)
    except ValidationError as error:
        message = f"{name}: expected {in_words(annotation)} for {parameter}; got {shown(value)}"
        if _fits_alone(value, accepts):
            others = [
                f"{key} is {shown(other)}"
                for key, other in given.items()
                if is_array(other) and key != parameter
            ]
            raise ValueError(f"{message}, where {' and '.join(others)}") from None
        raise _error_type(error)(message + _position(error) + _advice(annotation, value)) from None


def _advice(annotation: Any, value: Any) -> str:
    """Advice on making an accepted value: a mapping, or an object of a class with `made_by`."""
    kinds = list(_kinds(annotation))
    classes = dict.fromkeys(kind for kind in kinds if hasattr(kind, "made_by"))
    advice = [f"{kind.made_by} makes {kind.__name__}" for kind in classes]
    if Mapping in kinds and not isinstance(value, Mapping):
        advice.append("pass {name: ...}")
    return "".join(f"; {text}" for text in advice)


def _kinds(annotation: Any) -> Iterator[Any]:
    yield get_origin(annotation) or annotation
    for inside in get_args(annotation):
        yield from _kinds(inside)


def _fits_alone(value: Any, accepts: TypeAdapter) -> bool:
    """Whether an array is valid by itself, and only the sizes of other arguments do not match."""
    from pydantic import ValidationError

    try:
        with jaxtyping.jaxtyped("context"):  # type: ignore[call-overload]
            accepts.validate_python(value)
    except ValidationError:
        return False
    return True


def _error_type(error: ValidationError) -> type[ValueError | TypeError]:
    """ValueError if a value has the right type but is out of range, otherwise TypeError."""
    kinds = {detail["type"] for detail in error.errors(include_url=False, include_context=False)}
    ranges = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
    return ValueError if kinds & (ranges | {"literal_error", "finite_number"}) else TypeError


def _position(error: ValidationError) -> str:
    """The index of the first wrong member of a list, for the message."""
    path = [
        str(step) for step in error.errors(include_url=False)[0]["loc"] if isinstance(step, int)
    ]
    return f" (at index {', '.join(path)})" if path else ""
