"""Checks of the arguments of public functions and classes against their annotations.

pydantic reads a signature: ``steps: AtLeastOne``, ``heads: Sequence[tuple[int, int]]`` or
``tokens: Int[Tensor, "batch pos"]`` says what is accepted. A text is not a number, 2.0 is not a
whole number, NaN is not a number, and a text is not a list of texts. Axes of the same name must
have the same size in all arguments of a call. NumPy's numbers become Python's, and tensors of whole
numbers int64; nothing else is converted.

Modules of commands, which import this one, show their help before torch is imported.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from traceback import clear_frames
from typing import Annotated, Any, TypeVar

import jaxtyping
import numpy as np
from annotated_types import Ge, Gt, Le, Lt

MOST = 10**9
"""Largest count of steps, prompts or parts, since a longer run would not end; and largest rate or
cost, since optimizers overflow beyond it."""

Count = Annotated[int, Ge(0), Le(MOST)]
AtLeastOne = Annotated[int, Ge(1), Le(MOST)]
AtLeastTwo = Annotated[int, Ge(2), Le(MOST)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Positive = Annotated[float, Gt(0), Le(MOST)]
NotNegative = Annotated[float, Ge(0), Le(MOST)]
Fraction = Annotated[float, Ge(0), Le(1)]
Logit = Annotated[float, Ge(-10_000), Le(10_000)]
Share = Annotated[float, Gt(0), Le(1)]

Kind = TypeVar("Kind", bound=Callable[..., Any])


class ArgumentError(TypeError, ValueError):
    """An argument of the wrong type, out of range, or of a size that does not fit the others."""


def checked(target: Kind) -> Kind:
    """Check the arguments of a function, or of a class's constructor and public methods.

    Raises:
        ArgumentError: from the decorated function: an argument is not what its annotation says.
        MemoryError: a function with a `batch_size` ran out of memory.
    """
    if not isinstance(target, type):
        return _checked_function(target)
    owner: Any = target
    owner.__init__ = _checked_function(owner.__init__)
    for name, method in list(vars(owner).items()):
        function = getattr(method, "__func__", method)
        if not name.startswith("_") and inspect.isfunction(function):
            wrapped = _checked_function(function)
            setattr(owner, name, wrapped if function is method else type(method)(wrapped))
    return owner


def _checked_function(function: Any) -> Any:
    name = function.__qualname__.removesuffix(".__init__")
    check = functools.cache(functools.partial(_check, function))
    parameters = inspect.signature(function).parameters
    batch_size = parameters.get("batch_size")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from pydantic import ValidationError

        args = tuple(map(_plain, args))
        kwargs = {key: _plain(value) for key, value in kwargs.items()}
        try:
            # Axis sizes are bound in this call only, not in an enclosing one.
            with jaxtyping.jaxtyped("context"):  # type: ignore[call-overload]
                check()(*map(_listed, args), **{key: _listed(kwargs[key]) for key in kwargs})
        except ValidationError as error:
            raise ArgumentError(f"{name}: {_in_words(error, parameters)}") from None
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if batch_size is None or not is_out_of_memory(error):
                raise
            size = kwargs.get("batch_size", batch_size.default)
            given = "" if size is None else f" with batch_size={size}"
            raise MemoryError(
                f"{name} ran out of memory{given}. A smaller batch_size needs less. "
                f"({reason(error)})"
            ) from error

    return call


def _check(function: Any) -> Callable[..., None]:
    """A function that takes the same arguments and does nothing but check them."""
    from pydantic import ConfigDict, validate_call

    @functools.wraps(function)
    def check(*args: Any, **kwargs: Any) -> None: ...

    check.__annotations__ = {**function.__annotations__, "cls": Any, "return": None}
    for name, annotation in function.__annotations__.items():
        try:
            if isinstance(annotation, str):  # source code of this package, never input
                eval(annotation, inspect.unwrap(function).__globals__)
        except NameError:  # imported for type checkers only
            check.__annotations__[name] = Any
    rules = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return validate_call(config=rules)(check)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, and tensors of whole numbers as PyTorch's operations take."""
    import torch

    if isinstance(value, torch.Tensor) and value.dtype in (torch.int8, torch.int16, torch.int32):
        return value.long()
    return value.item() if isinstance(value, np.generic) else value


def _listed(value: Any) -> Any:
    """A range as a list: pydantic takes only lists and tuples for a Sequence."""
    return [*value] if isinstance(value, range) else value


def _in_words(error: Any, parameters: Mapping[str, Any]) -> str:
    from torch import Tensor

    first, *others = error.errors(include_url=False)
    if first["type"] == "unexpected_positional_argument":
        return f"too many positional arguments; got {first['input']!r:.80}"
    value, place = first["input"], first["loc"]
    expected = [first["msg"]]  # and what else a union takes
    for other in others:
        if other["input"] is value and other["loc"][0] == place[0]:
            if other["msg"] not in expected:
                expected.append(other["msg"].removeprefix("Input should be "))
            place = tuple(one for one, two in zip(place, other["loc"], strict=False) if one == two)
    argument, *inside = place
    inside = [one for one in inside if isinstance(one, int) or one.isidentifier()]
    name = [*parameters][argument] if isinstance(argument, int) else argument
    said = f"{', '.join(map(str, [name, *inside]))}: {' or '.join(expected)}"
    if first["type"].startswith("missing"):
        return said
    shown = f"{value!r:.80}"
    if isinstance(value, Tensor):
        shown = f"a {value.dtype} Tensor of shape {tuple(value.shape)}"
    hints = {"sequence_str": f"; a list of one is [{shown}]", "callable_type": ", not a function"}
    return f"{said}; got {shown}{hints.get(first['type'], '')}{close_choice(first)}"


def close_choice(error: Mapping[str, Any]) -> str:
    """The end of pydantic's message about a value that is none of some names: those like it."""
    known = re.findall(r"'([^']+)'", str(error.get("ctx", {}).get("expected", "")))
    hint = did_you_mean(str(error["input"]), known)
    return f".{hint}" if hint else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known ones that are like it, if any."""
    close = get_close_matches(name.lower(), known, cutoff=0.7)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine ran out of memory."""
    import torch

    of_the_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return of_the_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def reason(error: BaseException) -> str:
    """The error's message in one sentence; also frees the memory that the failed call held."""
    clear_frames(error.__traceback__)
    message = (str(error).strip().splitlines() or ["out of memory"])[0][:200]
    return message if message.endswith(".") else f"{message}."
