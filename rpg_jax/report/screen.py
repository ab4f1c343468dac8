"""Shows text of others on the screen, so that it cannot move the cursor, colour a line or fill a clipboard."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment

# Control characters but tabs and line feeds; overrides of the writing direction, which show a text in another order.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_NARROWEST = 40  # columns


def plain(text: str) -> str:
    """The text with control characters (but tab, line feed) and direction overrides as Python writes them: `\\x1b`."""
    return _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def code(value: object) -> str:
    """`str(value)` as inline code in Markdown, where nothing is read as markup. A backtick becomes an apostrophe."""
    return "`" + plain(str(value)).replace("`", "'") + "`"


def prose(text: object) -> str:
    """`str(text)` escaped for a place within a line of Markdown: its markup and HTML are shown as plain text."""
    return re.sub(r"([\\`*_\[\]<&~])", r"\\\1", plain(str(text)))


class _Plain(io.TextIOWrapper):
    """Writes `plain` text to the file of the stream `raw`. Libraries treat it as a file, and write no colours."""

    def __init__(self, raw: io.TextIOWrapper):
        self.raw, self._bars = raw, raw.name == "<stderr>"
        lines = raw.line_buffering
        # Nothing waits here: `raw` writes to the same buffer.
        super().__init__(raw.buffer, raw.encoding, "backslashreplace", line_buffering=lines, write_through=True)

    def write(self, text: str) -> int:
        kept = "\r" if self._bars and text.startswith("\r") else ""  # a library's bar goes back to its line's start
        with self._named():
            super().write(kept + plain(text.removeprefix(kept)))
        return len(text)

    def flush(self) -> None:
        with self._named():
            super().flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Names the stream in an OSError, as of a full disk. Waiting and later output is then dropped."""
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            error.filename = self.name
            raise

    def isatty(self) -> bool:
        return False


def guard() -> None:
    """Replaces `sys.stdout` and `sys.stderr`, so that what this process prints is `plain` text without colours. A
    character that the locale's encoding lacks is escaped too. On stderr "\\r" stays at the beginning of a write, for
    bars. A second call, or a call in a notebook, changes nothing. Programs that show tables take `console`."""
    for name in ("stdout", "stderr"):
        if type(stream := getattr(sys, name)) is io.TextIOWrapper:  # not in a notebook, nor under pytest
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Plain(stream))


class _Console(Console):
    def render(self, *given: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*given, **options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def console(stream: TextIO | None = None) -> Console:
    """A console of rich on `stream` (None: stdout), at least 40 columns wide. Its texts are `plain`, and markup in them
    is shown as it is. The console may use colours."""
    stream = sys.stdout if stream is None else stream
    stream = stream.raw if isinstance(stream, _Plain) else stream  # its colours are the console's own
    made = _Console(file=stream, markup=False, emoji=False, highlight=False)
    if made.width < _NARROWEST:  # the variable COLUMNS, which some programs set to 0
        made.width = _NARROWEST
    return made
