"""What research programmes share: command line, progress bar, the file of their numbers, tables and figures."""

import dataclasses
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rpg_jax.report.progress import Progress
from rpg_jax.report.seeds import Mean
from rpg_jax.report.tables import markdown_table
from rpg_jax.runs import cli, run_folder
from rpg_jax.storage import write_atomically

Row = TypeVar("Row", bound=Any)


def parser(name: str, description: str | None) -> cli.Parser:
    """The parser of `python -m experiments.NAME`, with --out and --quick; `description` is the text of its --help."""
    made = cli.parser(f"experiments.{name}", description or "")
    made.add_argument("--out", type=Path, default=Path(f"runs/{name}"), help="folder (default: %(default)s)")
    made.add_argument("--quick", action="store_true", help="a look, not a result: smaller settings")
    return made


def rows(title: str, estimators: Sequence[Row]) -> Iterator[Row]:
    """Yields the rows of an experiment, and shows a progress bar with the key of each."""
    with Progress(len(estimators), title=title, unit="row") as progress:
        for number, estimator in enumerate(estimators, start=1):
            progress.update(number, {}, title=f"{title}: {estimator.key}")
            yield estimator


def made_with() -> dict[str, Any]:
    """{"commit": …, "packages": …, …} of code and machine, without the command, which has paths of one machine."""
    return {name: value for name, value in run_folder.made_with().items() if name != "command"}


def packed(text: bytes) -> bytes:
    """The bytes of `text`, compressed by gzip; equal texts give equal bytes."""
    return gzip.compress(text, 9, mtime=0)


def write(path: Path, settings: Any, results: Mapping[str, Any]) -> None:
    """Writes the dataclass `settings`, `results` and the versions that made them to `path`, NAME.json.gz."""
    record = {"settings": dataclasses.asdict(settings), "made_with": made_with(), "results": results}
    write_atomically(path, packed(json.dumps(record, ensure_ascii=False).encode()))


def read(path: Path, settings: Any) -> dict[str, Any]:
    """The results in a file that `write` wrote; they are as JSON reads them, with keys that are texts.

    Raises ValueError if they are of other settings than the dataclass `settings`, FileNotFoundError without the file.
    """
    record = json.loads(gzip.decompress(path.read_bytes()))
    if record["settings"] != json.loads(json.dumps(dataclasses.asdict(settings))):
        raise ValueError(f"{path} has the results of other settings: make the file again by its program")
    return record["results"]


def heads(first: str, values: Sequence[str] | Sequence[float]) -> list[str]:
    """The heads of neighbouring columns: `first`, which says what the values are, stands before the first value."""
    texts = [value if isinstance(value, str) else f"{value:g}" for value in values]
    return [f"{first}{texts[0]}", *texts[1:]]


def table(head: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A table in Markdown, whose first columns are so many of `words`; in the others stand numbers."""
    return markdown_table(head, rows, numbers=range(words, len(head)))


def interval(m: Mean, digits: int = 3, sign: str = "") -> str:
    """The text "value ± half", or "value" of one seed, with so many digits after the point; `sign` "+" shows a +."""
    return f"{m.value:{sign}.{digits}f}" + ("" if math.isnan(m.half) else f" ± {m.half:.{digits}f}")


def write_page(out: Path, tables: Mapping[str, str], **figures: bytes) -> None:
    """Writes NAME.png of each figure and `tables.md` into the folder `out`, and prints the path of the tables.

    `tables` is {title: table}, each table in Markdown, which stands below its title as a heading.
    """
    for name, png in figures.items():
        write_atomically(out / f"{name}.png", png)
    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items()) + "\n"
    write_atomically(out / "tables.md", text)
    print(out / "tables.md")
