r"""How a loss, an advantage, an aggregate or a divergence is declared: one function, with its equation above it.

    @LOSSES.declare(r"-\mathrm{sg}(\min(w, 1+\varepsilon_2)) A \log\pi_\theta")
    def cispo(tokens: Tokens, *, clip_high: ClipHigh = 0.28) -> TokenLoss:

adds a loss under the function's name; `declare_own_loss` adds one from outside this repository. Symbols in equations:
w = π_θ/π_old, ρ = π_ref/π_old, r = w/ρ, A the advantage, R rewards; sg stops the gradient. Keyword-only arguments are
hyperparameters. Their annotations declare their values, and `check` applies the annotations at trace time:

    kl_coef: Annotated[float, Range("[0, inf)")]       a number in a range; also None for `float | None`
    clip: Literal["none", "dual"]                      a word of a list
    divergence: Annotated[str, DIVERGENCES]            a name of a table
"""

import dataclasses
import difflib
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])
Row = TypeVar("Row")


class Range(NamedTuple):
    """An interval as mathematics writes it, for example "[0, 1)" or "(1, inf]"; a square bracket includes its bound."""

    text: str

    def holds(self, x: float) -> bool:
        """Whether the number lies in the interval; False for NaN."""
        low, high = (float(end) for end in self.text[1:-1].split(","))
        return low < x < high or (x == low and self.text[0] == "[") or (x == high and self.text[-1] == "]")


# Hyperparameters of several losses: β, then ε₁, ε₂ and c of the clips (None: no dual clip).
KLCoef = Annotated[float | jax.Array, Range("[0, inf)")]
ClipLow = Annotated[float, Range("[0, 1)")]
ClipHigh = Annotated[float, Range("[0, inf)")]
ClipDual = Annotated[float | None, Range("(1, inf]")]


def declared(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's keyword-only arguments: name -> annotation, where `Literal[words]` becomes `Annotated[str, words]`,
    `words` a tuple. Raises TypeError for another annotation or none, NameError for an annotation that names nothing."""
    hints, names = typing.get_type_hints(function, include_extras=True), list(keywords(function))
    for name in names:
        if typing.get_origin(hints.get(name)) is Literal:
            hints[name] = Annotated[str, typing.get_args(hints[name])]
        if typing.get_origin(hints.get(name)) is not Annotated:
            raise TypeError(f"{function.__name__} must declare {name} as Literal[...] or Annotated[float, Range(...)]")
    return {name: hints[name] for name in names}


def keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a function by name, in order."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def passes_on_to(*functions: Callable[..., Any]) -> Callable[[Function], Function]:
    """A decorator for a function that hands its `**options` to one of `functions`: its signature names the options.

    The decorator changes what `inspect.signature` and `__annotations__` show; it changes no call. After the function's
    own parameters they show the keyword-only parameters of `functions`, with annotations and defaults. If several of
    `functions` have a parameter of one name, the last function's counts; the decorated function's own counts first.
    """

    def add(function: Function) -> Function:
        sources = (*functions, function)
        named = keywords(function)
        for source in functions[::-1]:
            named |= {name: parameter for name, parameter in keywords(source).items() if name not in named}
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        whole = signature.replace(parameters=[*own, *named.values()])
        hints = {name: hint for source in sources for name, hint in source.__annotations__.items()}
        vars(function).update(__signature__=whole)
        function.__annotations__ = hints
        return function

    return add


def check(loss: str, declarations: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises ValueError unless every hyperparameter of `given` (name -> value) is declared and its value allowed.
    `declarations` are a result of `declared`; `loss` is a name for the message. A `jax.Array` (a scheduled coefficient)
    passes unchecked, because its value may be unknown while tracing."""
    for name, value in given.items():
        if name not in declarations:
            raise unknown(f"hyperparameter of loss {loss!r}:", name, declarations)
        kind, allowed = typing.get_args(declarations[name])
        optional = types.NoneType in typing.get_args(kind)
        if isinstance(value, jax.Array) or (value is None and optional):
            continue
        if not isinstance(allowed, Range):
            if not isinstance(value, str) or value not in allowed:
                raise unknown(name, value, allowed)
            continue
        number = isinstance(value, numbers.Real | np.ndarray | np.generic) and not isinstance(value, bool)
        if not number or np.ndim(value) or not allowed.holds(float(value)) or (kind is int and float(value) % 1):
            whole = "a whole number " if kind is int else ""
            off = ", or None to switch it off" if optional else ""
            raise ValueError(f"{name} of loss {loss!r} must be {whole}in {allowed.text}{off}; got {value!r}")


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """Returns a ValueError: no `what`, such as "loss", has this `name`. Its message lists `known` and a close name."""
    spelled = {one.lower(): one for one in known}
    close = difflib.get_close_matches(str(name).lower(), spelled, n=1)
    guess = f" Did you mean {spelled[close[0]]!r}?" if close else ""
    return ValueError(f"unknown {what} {name!r}.{guess} Known: {', '.join(spelled.values())}")


def lookup(table: Mapping[str, Row], what: str, name: str) -> Row:
    """table[name]. Raises the ValueError of `unknown` if the table lacks the name; `what` is the word for a row."""
    if not isinstance(name, str) or name not in table:
        raise unknown(what, name, table)
    return table[name]


@dataclasses.dataclass(frozen=True)
class Declared:
    """A function and its LaTeX, which docs/methods.md prints."""

    function: Callable[..., Any]
    equation: str

    def takes(self, argument: str) -> bool:
        """Whether the function has a parameter named `argument`."""
        return argument in inspect.signature(self.function).parameters


class Table(dict[str, Row], Generic[Row]):
    """Declared functions by name. `row` makes a table's entry from a function and the arguments of `declare`."""

    def __init__(self, row: Callable[..., Row]):
        super().__init__()
        self._row = row

    def __repr__(self) -> str:
        return f"Table({', '.join(self)})"

    def declare(self, *equations: Any, name: str = "", **options: Any) -> Callable[[Function], Function]:
        """A decorator that adds `row(function, *equations, **options)` under `name`, or under the function's own name
        if `name` is "". It returns the function unchanged."""

        def add(function: Function) -> Function:
            self[name or function.__name__] = self._row(function, *equations, **options)
            return function

        return add


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """A loss before aggregation, of B rows of T tokens.

    Attributes:
      values: f[B, T], each token's loss, to be minimised.
      events: name -> bool[B, T], the tokens to which something happened, for example a clip; the fraction of these
        tokens becomes the metric `<name>_fraction`.
    """

    values: jax.Array
    events: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    def plus(self, values: jax.Array) -> "TokenLoss":
        """The same loss with the term `values` f[B, T] added; the events stay."""
        return TokenLoss(self.values + values, self.events)


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A declared loss. Raises TypeError or NameError as `declared`, for an argument that does not declare its values.

    Attributes:
      function: (tokens, **hyperparameters) -> `TokenLoss`.
      equation: LaTeX of a token's loss, or a function of the hyperparameters that returns this LaTeX.
      aggregate: name in `AGGREGATES`, for callers that name no aggregate.
      check_aggregate: takes `aggregate` and the hyperparameters that a caller gives, all by name; raises ValueError if
        the aggregate and the hyperparameters do not fit together.
      name: of the loss in `LOSSES`; "" becomes the name of the function.
      hyperparameters: what `declared` returns for the function.
    """

    function: Callable[..., TokenLoss]
    equation: str | Callable[..., str] = ""
    aggregate: str = "token_mean"
    check_aggregate: Callable[..., None] = lambda aggregate, **hyperparameters: None
    name: str = ""
    hyperparameters: Mapping[str, Any] = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "name", self.name or self.function.__name__)
        object.__setattr__(self, "hyperparameters", declared(self.function))

    def latex(self, **hyperparameters: Any) -> str:
        """LaTeX of a token's loss with these hyperparameters, or "" if the loss has no equation."""
        return self.equation if isinstance(self.equation, str) else self.equation(**hyperparameters)

    def check(self, given: Mapping[str, Any], of_every_loss: Mapping[str, Any]) -> None:
        """Raises ValueError if `given` (name -> value) has a value that is not allowed, has a name that neither the
        function nor `of_every_loss` (name -> annotation) declares, or lacks a hyperparameter without a default."""
        check(self.name, {**self.hyperparameters, **of_every_loss}, given)
        for name, parameter in keywords(self.function).items():
            if parameter.default is parameter.empty and name not in given:
                raise ValueError(f"loss {self.name!r} needs the hyperparameter {name}, which has no default: give it")

    def __call__(self, tokens: Any, **hyperparameters: Any) -> TokenLoss:
        """The loss of each token of `Tokens`; the hyperparameters are not checked. Raises ValueError if the function
        returns no `TokenLoss`, or an array of it has a wrong shape or dtype."""
        result = self.function(tokens, **hyperparameters)
        wanted = jax.ShapeDtypeStruct(tokens.logprobs.shape, tokens.logprobs.dtype)
        if not isinstance(result, TokenLoss):
            raise ValueError(f"loss {self.name!r} must return a losses.TokenLoss, got {type(result).__name__}")
        for name, array in {"values": result.values, **result.events}.items():
            dtype = wanted.dtype if name == "values" else bool
            if not hasattr(array, "dtype") or array.shape != wanted.shape or array.dtype != dtype:
                got = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
                raise ValueError(
                    f"loss {self.name!r} must return {name} as {jnp.dtype(dtype)}{list(wanted.shape)}, one a token; "
                    f"got {got}"
                )
        return result


LOSSES = Table(Loss)


def find_loss(loss: str | Loss) -> Loss:
    """The row of `LOSSES` with the name `loss`, or `loss` itself if it is a `Loss`. Raises ValueError if unknown."""
    return loss if isinstance(loss, Loss) else lookup(LOSSES, "loss", loss)


def declare_own_loss(name: str, function: Callable[..., TokenLoss]) -> Loss:
    """Adds a loss from outside this repository to `LOSSES` and returns its row.

    `function(tokens, *, hyperparameters)` takes `Tokens` and returns a `TokenLoss`. Each hyperparameter declares its
    values by `Literal[...]` or `Annotated[float, Range(...)]`. `name` is "module:function", the value of `loss.name` in
    a config. If `name` has a row of this function, nothing changes; a row of another function is replaced. Raises
    ValueError if `function` does not have this form.
    """
    if name in LOSSES and LOSSES[name].function is function:
        return LOSSES[name]
    if not inspect.isfunction(function):
        raise ValueError(f"the loss {name!r} must be a function, made with def; got {type(function).__name__}")
    others = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if len(others) != 1:
        raise ValueError(
            f"the loss {name!r} is called with tokens, and its hyperparameters by keyword: write def "
            f"{function.__name__}(tokens, *, tau=…); it has the positional arguments {others}"
        )
    try:
        LOSSES[name] = Loss(function, name=name)
    except (TypeError, NameError) as error:
        raise ValueError(f"the loss {name!r}: {error}") from error
    return LOSSES[name]
