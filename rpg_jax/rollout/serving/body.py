"""The fields of a request's JSON object, taken one by one with their types and ranges."""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from rpg_jax.types import Sampling

_MOST_STOPS = 16


class Body:
    """A request's fields; null counts as absent. Every method raises ValueError with the name of a wrong field."""

    def __init__(self, fields: Mapping[str, Any]):
        self._left = {name: value for name, value in fields.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """The field, of any type; it is not taken again."""
        return self._left.pop(name, default)

    def number(self, name: str, default: float) -> float:
        value = self.take(name, default)
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"{name} must be a finite number, got {_short(value)}")
        return number

    def whole(self, name: str, default: int | None, low: int, high: int = 2**31 - 1) -> Any:
        """A whole number in `low`..`high`, or the default."""
        value = self.take(name, default)
        if value is not default and (type(value) is not int or not low <= value <= high):
            raise ValueError(f"{name} must be a whole number from {low} to {high}, got {_short(value)}")
        return value

    def truth(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {_short(value)}")
        return value

    def flags(self, name: str, known: str) -> dict[str, bool]:
        """An object that has no other entry than `known`, which is true or false."""
        value = self.take(name, {})
        if not isinstance(value, dict) or not all(key == known and isinstance(value[key], bool) for key in value):
            raise ValueError(f'{name} must be {{"{known}": true or false}}, got {_short(value)}')
        return value

    def stops(self) -> tuple[str, ...]:
        """`stop`: a text or a list of texts, at which a completion ends."""
        value = self.take("stop", [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"stop must be a text or a list of texts, none of them empty, got {_short(value)}")
        if len(texts) > _MOST_STOPS:
            raise ValueError(f"stop has {len(texts)} texts; {_MOST_STOPS} are the most")
        return tuple(texts)

    def wholes(self, name: str, low: int, high: int) -> list[int] | None:
        """A list of whole numbers in `low`..`high`, or None."""
        value = self.take(name)
        fits = isinstance(value, list) and all(type(one) is int and low <= one <= high for one in value)
        if value is not None and not fits:
            raise ValueError(f"{name} must be a list of whole numbers from {low} to {high}, got {_short(value)}")
        return value

    def sampling(self, defaults: Sampling, max_tokens: int) -> Sampling:
        """`temperature`, `top_p`, `top_k` (-1 and 0 are off), `min_p` and `stop_token_ids`."""
        stops = self.wholes("stop_token_ids", 0, 2**31 - 1)
        return Sampling(
            temperature=self.number("temperature", defaults.temperature),
            top_p=self.number("top_p", defaults.top_p),
            top_k=max(0, self.whole("top_k", defaults.top_k, low=-1)),
            min_p=self.number("min_p", defaults.min_p),
            max_tokens=max_tokens,
            stop_token_ids=defaults.stop_token_ids if stops is None else tuple(stops),
        )

    def end(self, unused: Mapping[str, Collection[Any] | None]) -> None:
        """Raises ValueError if a field is left; `unused` ones may be left with a value that changes nothing.

        Args:
          unused: these values by field; None for all.
        """
        for name in sorted(self._left):
            value, harmless = self._left[name], unused.get(name, ())
            if harmless is not None and value not in harmless:
                raise ValueError(f"{name}={_short(value)} is not supported here: leave {name} out")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:100]}…"
