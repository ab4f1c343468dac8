"""A process that repeats the same work in another library, one piece at a time."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Opponent:
    """Runs a script of this folder in the interpreter `python`; "torch" is this interpreter.

    The script reads the sizes of the work, one JSON object, from its first line. For every further line it works once
    and answers with one JSON object; `first` is the first answer.

    Raises:
      ValueError: the interpreter does not start, or the script ends: the interpreter lacks a package, for example.
    """

    def __init__(self, python: str, script: str, sizes: Mapping[str, Any]):
        self._python = sys.executable if python == "torch" else python
        command = [self._python, str(Path(__file__).with_name(script))]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise ValueError(f"--against={python}: {error}") from None
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        self.first = self._answer(json.dumps({**sizes, "threads": threads}) + "\nagain")

    def work(self) -> dict[str, Any]:
        """Does the work once more; returns the script's measurements."""
        return self._answer("again")

    def close(self) -> None:
        self._process.communicate()

    def _answer(self, question: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout  # both are pipes
        try:
            print(question, file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            why = f"{self._python} gave no answer: see its message above; has it the peer's packages?"
            raise ValueError(why) from None
