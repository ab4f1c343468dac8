"""A judge or a reward model behind HTTP: many requests at once, a deadline for each verdict, retries, a cache.

A judge gets chat requests (`kind="chat"`, OpenAI's /chat/completions), each with one completion. A scoring
endpoint (`kind="score"`) gets {"model", "prompts", "completions", "answers"} and returns {"scores": [numbers]}.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from etils import epy

from rpg_jax.rewards.callables import Background, together
from rpg_jax.rewards.verdicts import BadScore, Verdict, checked_score, failure

with epy.lazy_imports():  # an extra: every run reads the fields of a judge, and few ask one
    import aiohttp

PROMPT = (
    "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to grade:\n{completion}\n\n"
    "Grade the answer. End with a line that holds one number only, from 0 (wrong) to {scale} (right)."
)
ATTEMPTS = 4  # to send a request
REMEMBERED = 100_000  # scores
KEY_VARIABLE = "JUDGE_API_KEY"  # the environment variable with the server's API key, if it has one
_MOST_BYTES = 2**22  # of a reply
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_BRACKETS = re.compile(r"\([^()]*\)")
_SCALE = re.compile(r"\d\s*(?:to|[-–])\s*\d")  # (0 to 10); the grade may be (8) or (8 out of 10)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

Item = tuple[str, str, str]
"""Completion, answer, prompt: the arguments of a verifier."""


class Failed(Exception):
    """A request failed. `kind` is "status", "timeout" or "unreachable". If `again`, another attempt may help, at the
    earliest `after` seconds later."""

    def __init__(self, kind: str, detail: str, *, again: bool = False, after: float = 0.0):
        super().__init__(detail)
        self.kind, self.again, self.after = kind, again, after


@dataclasses.dataclass(frozen=True)
class Server:
    """The server of a judge, and the form of the requests. The config's section `judge` has the same fields.

    Attributes:
      url: http(s)://HOST:PORT/v1 of a chat model, or the whole address of a scoring endpoint.
      kind: "chat", a model that grades in words, or "score", an endpoint that returns numbers.
      model: name of the model, sent with each request.
      prompt: message to a chat model with {completion}, {prompt}, {answer}, {scale}; "" takes this file's `PROMPT`.
      scale: the best grade of a chat model; its score is grade / scale.
      max_tokens: limit of a chat model's reply.
      batch: completions in a request to a scoring endpoint; a chat request has one.
      parallel: requests at a time.
      deadline_seconds: time for a request, from its first attempt, retries included.

    Raises ValueError if `url` is not an HTTP address, or `prompt` lacks {completion}.
    """

    url: str | None = None
    kind: str = "chat"
    model: str = "default"
    prompt: str = ""
    scale: float = 10.0
    max_tokens: int = 256
    batch: int = 16
    parallel: int = 16
    deadline_seconds: float = 60.0

    def __post_init__(self):
        if not re.match(r"https?://([^\s/:\[\]]+|\[[\da-f:.]+\])(:\d{1,5})?([/?]\S*)?$", self.url or "", re.IGNORECASE):
            raise ValueError(
                f"the reward judge needs judge.url=http://HOST:PORT/v1 (a chat model) or the address of a scoring "
                f"endpoint with judge.kind=score, got {self.url!r}"
            )
        if "{completion}" not in (self.prompt or PROMPT):
            raise ValueError("judge.prompt must contain {completion}; {prompt}, {answer} and {scale} are filled in too")

    def body(self, items: Sequence[Item]) -> dict[str, Any]:
        """Returns the JSON body of a request about `items`. A chat request has exactly one item."""
        if self.kind == "score":
            completions, answers, prompts = (list(texts) for texts in zip(*items, strict=True))
            return {"model": self.model, "prompts": prompts, "completions": completions, "answers": answers}
        [(completion, answer, prompt)] = items
        texts = {"completion": completion, "answer": answer, "prompt": prompt, "scale": f"{self.scale:g}"}
        asked = re.sub(r"\{(\w+)\}", lambda m: texts.get(m[1], m[0]), self.prompt or PROMPT)  # once: texts have braces
        message = {"role": "user", "content": asked}
        return {"model": self.model, "messages": [message], "temperature": 0, "max_tokens": self.max_tokens}

    def verdicts(self, reply: Any, count: int) -> list[Verdict]:
        """Returns the verdicts in a reply's JSON, in order. Raises Failed if the reply has another form, or not `count`
        scores. A score that is no number within ±1e6, or a chat reply whose last line has no grade from 0 to `scale`,
        becomes a verdict with the error "value"."""
        try:
            given = reply["scores"] if self.kind == "score" else [reply["choices"][0]["message"]["content"] or ""]
            found = [self._verdict(one) for one in given]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Failed("status", f"a reply of another form: {str(reply)[:100]}") from error
        if len(found) != count:
            raise Failed("status", f"{len(found)} scores for {count} completions")
        return found

    def _verdict(self, given: Any) -> Verdict:
        try:
            return Verdict(checked_score(given) if self.kind == "score" else self._graded(given))
        except BadScore as error:
            return failure(error)

    def _graded(self, text: str) -> float:
        """Returns the last line's number (8, 8/10, Score (0-9) - 8) / `scale`. Raises BadScore if not in [0, scale]."""
        last = next(filter(str.strip, reversed(text.rpartition("</think>")[2].splitlines())), "")
        graded = _BRACKETS.sub(lambda found: "" if _SCALE.search(found[0]) else found[0], last)
        found = _NUMBER.search(graded.rpartition(":")[2])
        if found is None:
            raise BadScore(f"no number in the judge's last line: {text[-80:]!r}")
        score = float(found[0])
        if not 0 <= score <= self.scale:
            raise BadScore(f"{score:g} is not in [0, {self.scale:g}]")
        return score / self.scale


class Judge:
    """Asks a server for verdicts. Several threads may use one judge, which remembers its last 100,000 scores. The
    environment variable JUDGE_API_KEY, if set, is sent as a bearer token. `sleep` waits seconds between attempts.

    Raises ImportError if aiohttp is not installed."""

    def __init__(self, server: Server, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep):
        self.server, self._sleep = server, sleep
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)  # each request has a deadline of its own
        self._room = asyncio.Semaphore(server.parallel)
        self._background = Background("judge")
        self._known = dict[Item, float]()
        self._lock = threading.Lock()
        parts = urllib.parse.urlsplit(str(server.url))
        path = parts.path.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self._url = str(server.url) if server.kind == "score" else parts._replace(path=path).geturl()

    def run(self, items: Sequence[Item]) -> list[Verdict]:
        """Waits for one verdict per (completion, answer, prompt), and returns them in order. Equal items are sent once.
        A request that failed for a passing cause is sent again within its deadline, up to 4 times in all. If no
        attempt succeeds, the items of the request get verdicts with an error, and a later call asks for them again."""
        with self._lock:
            verdicts = {item: Verdict(self._known[item]) for item in set(items) if item in self._known}
        new = [item for item in dict.fromkeys(items) if item not in verdicts]
        size = self.server.batch if self.server.kind == "score" else 1
        batches = [new[i : i + size] for i in range(0, len(new), size)]
        [answers] = self._background.together([self._answers(batches)])
        for batch, found in zip(batches, answers, strict=True):
            verdicts |= zip(batch, found, strict=True)
        with self._lock:
            self._known |= {item: v.score for item, v in verdicts.items() if v.score is not None}
            while len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
        return [verdicts[item] for item in items]

    def close(self) -> None:
        """Breaks off the requests that are under way. `run` then raises RuntimeError."""
        self._background.close()

    async def _answers(self, batches: Sequence[Sequence[Item]]) -> list[list[Verdict]]:
        # A proxy of the environment is used, as by most clients. A new process of the server gets new connections.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=True) as session:
            return await together(self._judged(session, batch) for batch in batches)

    async def _judged(self, session: aiohttp.ClientSession, batch: Sequence[Item]) -> list[Verdict]:
        """Sends a request and returns its verdicts. After a failure that may pass, sends again, with longer pauses."""
        async with self._room:
            deadline, attempt = time.monotonic() + self.server.deadline_seconds, 0
            while True:
                attempt += 1
                try:
                    reply = await self._reply(session, self.server.body(batch), deadline)
                    return self.server.verdicts(reply, len(batch))
                except Failed as error:
                    pause = max(error.after, 0.25 * 2**attempt * random.uniform(0.5, 1.5))
                    if not error.again or attempt >= ATTEMPTS or time.monotonic() + pause > deadline:
                        return [Verdict(None, error.kind, str(error)[:200])] * len(batch)
                await self._sleep(pause)

    async def _reply(self, session: aiohttp.ClientSession, body: dict[str, Any], deadline: float) -> Any:
        """Sends `body` and returns the JSON of the reply. Raises Failed if no such reply comes in time."""
        key = os.environ.get(KEY_VARIABLE, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        status, after, content = 0, "", bytearray()
        try:
            async with (
                asyncio.timeout(deadline - time.monotonic()),
                session.post(self._url, json=body, headers=headers, allow_redirects=False) as reply,
            ):
                status, after = reply.status, reply.headers.get("Retry-After", "")
                async for part in reply.content.iter_any():
                    content += part
                    if len(content) > _MOST_BYTES:
                        raise Failed("status", f"a reply of more than {_MOST_BYTES} bytes")
        except (OSError, aiohttp.ClientError) as error:
            if status < 300:  # the status of an error says enough without the text
                if isinstance(error, TimeoutError):
                    late = f"no reply in judge.deadline_seconds={self.server.deadline_seconds:g}"
                    raise Failed("timeout", late) from error
                raise Failed("unreachable", f"{self._url}: {error}", again=True) from error
        if status >= 300:
            said = content[:200].decode(errors="replace")
            seconds = float(after) if after.isdecimal() else 0.0
            said = said.replace(key, "…") if key else said
            raise Failed("status", f"HTTP {status}: {said}", again=status in _AGAIN, after=seconds)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise Failed("status", f"the reply is no JSON: {bytes(content[:80])!r}") from error
