"""A tool of one's own for the environment "tools": search over the rows of a local file.

docs/environments.md has the command that gives the tool to a policy.
"""

from __future__ import annotations

import collections
import json
import math
import re
from pathlib import Path

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75


class Search:
    """Finds rows of a table by words.

    The score of a row is BM25 over its words, without case:
      Σ_w log(1 + (N - n_w + 0.5) / (n_w + 0.5)) · f (k₁ + 1) / (f + k₁ (1 - b + b L / L̄)), k₁ = 1.2, b = 0.75,
    with N rows, n_w of them with the word w, f times in this row of L words; L̄ is the mean of L. Rows of equal scores
    come in the file's order.

    Args:
      file: JSONL; a row is an object, or a text.
      top: number of rows in a result.
      characters: the longest row in a result.

    Raises:
      ValueError: there is no such file, or a line is not JSON.

    Source: Robertson and Zaragoza (2009), The Probabilistic Relevance Framework, section 3.4; Lucene's logarithm.
    """

    def __init__(self, *, file: str, top: int = 3, characters: int = 500):
        self._rows, self._top, self._characters = _read(Path(file)), top, characters
        self._counts = [collections.Counter(_words(row)) for row in self._rows]
        self._rows_with = collections.Counter(word for counts in self._counts for word in counts)
        lengths = [counts.total() for counts in self._counts]
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        self._norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]
        self._places: dict[str, list[int]] = collections.defaultdict(list)
        for place, counts in enumerate(self._counts):
            for word in counts:
                self._places[word].append(place)

    def __call__(self, query: str) -> str:
        """Searches the table for the words of a query, and returns the best rows, one a line."""
        scores: dict[int, float] = collections.defaultdict(float)
        for word in dict.fromkeys(_words(query)):
            n = self._rows_with.get(word, 0)
            weight = math.log1p((len(self._rows) - n + 0.5) / (n + 0.5))
            for place in self._places.get(word, ()):
                f = self._counts[place][word]
                scores[place] += weight * f * (_K1 + 1) / (f + self._norms[place])
        best = sorted(scores, key=lambda place: (-scores[place], place))[: self._top]
        return "\n".join(self._rows[place][: self._characters] for place in best) or "nothing found"


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _read(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"search: cannot read file={str(file)!r}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise ValueError(f"search: {file} line {number} is not JSON: {error}") from error
        if row is not None:
            rows.append(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False))
    return rows
