"""The driver "servers": a rollout whose completions come from servers; and the scores of a teacher on servers."""

import asyncio
import dataclasses
import functools
import json
import queue
from collections.abc import Sequence
from typing import Any

import numpy as np

from rpg_jax.data.groups import Group
from rpg_jax.parallel import hosts
from rpg_jax.rewards.callables import Background, together
from rpg_jax.rollout.request import Request, Row
from rpg_jax.rollout.rollout import Rollout
from rpg_jax.rollout.schedule import Finish
from rpg_jax.rollout.servers.balance import Balance
from rpg_jax.rollout.servers.client import Caller, Client, Refused, ServerError, Unavailable
from rpg_jax.rollout.servers.protocol import Loadable, ScoreRequest, TurnRequest
from rpg_jax.rollout.servers.server import KINDS
from rpg_jax.rollout.servers.weight_folders import WeightFolders
from rpg_jax.rollout.serving.access import ApiKey
from rpg_jax.rollout.weights import Weights
from rpg_jax.types import Completion

_TIMEOUT = 600.0  # seconds for one completion of a server that is shared, its wait for a slot included
_PATIENCE = 60.0  # seconds without an answer of that server


class ServersRollout(Rollout):
    """The rollout that calls a server for each completion, or for each turn if there is an environment.

    A server loads the weights before its first completion of these weights. Each process of the trainer passes `sample`
    only its own share of the prompts. The constructor starts a thread, which runs `balance`.

    Args:
      balance: chooses a server for each call.
      weights: the weights that servers load, or the weights of a server that other clients use too.
      model: the name under which servers have the model; None for the only model of a server.
      counters: whether the servers are this project's own, which draw the random numbers of this project.
      capacity, vocab_size: the most tokens of a prompt with its completion, and the number of token ids of the model.
    """

    apart = True

    def __init__(
        self,
        balance: Balance,
        weights: "WeightFolders | ServersWeights",
        *,
        model: str | None = None,
        counters: bool = False,
        capacity: int,
        vocab_size: int,
    ):
        self.weights, self._deployed, self._balance = weights, weights, balance
        self._model, self._counters = model, counters
        self._capacity, self._vocab_size = capacity, vocab_size
        self._exchange = hosts.Exchange()
        self._background = Background("rpg-served")
        self._running = self._background.begin(balance.run())  # kept: a loop refers weakly to its tasks

    def sample(self, request: Request) -> list[list[Completion]]:
        """Waits for the completions of each prompt, and returns them in order; [] for a prompt in `request.done`.
        `request.on_group` runs in the caller's thread; if it raises, the calls are cancelled. Raises ValueError if a
        prompt with its limit of tokens is longer than `capacity` or a token is not below `vocab_size`; and ServerError,
        a RolloutError and ValueError, if servers refuse, do not answer for long, or answer something unusable."""
        request.check_fits(capacity=self._capacity, vocab_size=self._vocab_size)
        groups: list[list[Completion]] = [[] for _ in request.prompts]
        made: queue.SimpleQueue[tuple[int, list[Completion]] | None] = queue.SimpleQueue()
        self._balance.begin()
        asking = self._background.begin(self._all(request, made))
        asking.add_done_callback(lambda _: made.put(None))
        try:
            while (found := made.get()) is not None:
                place, groups[place] = found
                if request.on_group is not None:
                    request.on_group(*found)
        except BaseException:
            asking.cancel()
            raise
        asking.result()
        return groups

    def exchange(self, value: bytes) -> list[bytes]:
        """The `value` of every process, in the order of processes. All processes call this together and wait for all.
        In each process, any thread may call it, but only one thread at a time."""
        return self._exchange.all_gather_bytes(value)

    def take_counts(self) -> dict[str, float]:
        """Metrics servers/NAME for the time since the last call, of all processes, which call this together. NAME is
        a name of `Balance.counts`: of `answering` the smallest number of a process, of `longest_idle` and `probe_gap`
        the largest, of all other names the sum. If the weights lie in folders, the result has the metrics of
        `WeightFolders.take_counts` too."""
        counts = self._balance.counts()
        said = [json.loads(one) for one in hosts.all_gather_bytes(json.dumps(counts).encode())]
        together = {"answering": min, "longest_idle": max, "probe_gap": max}
        found = {f"servers/{name}": together.get(name, sum)(one[name] for one in said) for name in counts}
        return found | self._deployed.take_counts()

    def close(self) -> None:
        """Ends the calls under way, then the thread. A second call does nothing."""
        self._background.close()

    async def _all(self, request: Request, made: queue.SimpleQueue[Any]) -> None:
        """Samples all prompts, and puts (place, completions) of each complete group into `made`."""
        groups, version = [request.rows(place) for place in range(len(request.prompts))], self.weights.version
        finish = Finish(dataclasses.replace(request, on_group=lambda *found: made.put(found)), groups)
        # A completion that fails ends the others.
        await together(self._one(row, finish, version) for place in request.order for row in groups[place])

    async def _one(self, row: Row, finish: Finish, version: int) -> None:
        while True:
            question = TurnRequest(row, self._model, self._counters)
            read = functools.partial(question.completion, version=version, vocab_size=self._vocab_size)
            turn = await self._balance.ask(question.body, read)
            row.transcript.extend(turn.tokens, turn.logprobs, version)
            if row.environment is None or not row.take(await asyncio.wrap_future(row.ask()), version):
                finish.completed(row)
                return


class ServersWeights(Weights):
    """The weights of a server that has other clients too, with the checksum that the server gave, as version 0. This
    process can neither read nor replace the weights."""

    def __init__(self, checksum: int):
        self.version, self._said = 0, checksum

    def checksum(self) -> int:
        """The 64-bit checksum of the weights, as the server gave it."""
        return self._said

    def take_counts(self) -> dict[str, float]:
        """{}: no weights are written, so there are no metrics."""
        return {}


class ServedTeacher:
    """Asks servers of a teacher for log π_teacher of completions, at temperature 1. Each process asks for its share of
    the completions, and all processes get all numbers. The constructor starts a thread, which runs `balance`. No server
    is told to load weights.

    Args:
      balance: chooses a server for each call.
      model: the name under which servers have the teacher; None for the only model of a server.
      drawn: the number of tokens that a request draws after a text that it scores, see `Kind.drawn`.
    """

    def __init__(self, balance: Balance, *, model: str | None = None, drawn: int = 0):
        self._balance, self._question = balance, functools.partial(ScoreRequest, model=model, drawn=drawn)
        balance.use(Loadable("", "", 0))
        self._background = Background("rpg-teacher")
        self._running = self._background.begin(balance.run())

    def logprobs(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """For each group, and each of its completions, the log-probabilities f32[n], in nats, of the completion's n
        tokens. Blocks. All processes call this together, with the same groups. Raises ServerError as `Balance.ask`."""
        texts = [(g.prompt, completion.tokens) for g in groups for completion in g.completions]
        own = self._ask([self._question(np.concatenate(text), len(text[0])) for text in hosts.share(texts)])
        parts = hosts.all_gather_bytes(np.concatenate([np.zeros(0, np.float32), *own]).tobytes())
        found: list[np.ndarray] = [np.zeros(0)] * len(texts)
        for process, part in enumerate(parts):
            ends = np.cumsum([len(completion) for _, completion in texts[process :: len(parts)]])
            found[process :: len(parts)] = np.split(np.frombuffer(part, np.float32), ends)[:-1]
        scores = iter(found)
        return [[next(scores) for _ in g.completions] for g in groups]

    def names(self, tokens: np.ndarray) -> list[str]:
        """The text of each of the tokens i32[n], n ≥ 1, by the servers' tokenizer. Blocks. One process may call it
        alone. Raises ServerError as `Balance.ask`."""
        [found] = self._ask([self._question(tokens, 0, names=True)])
        return found

    def close(self) -> None:
        """Ends the calls under way, then the thread. A second call does nothing."""
        self._background.close()

    def _ask(self, requests: Sequence[ScoreRequest]) -> list[Any]:
        self._balance.begin()
        return self._background.together(self._balance.ask(one.body, one.read) for one in requests)


def connect(
    url: str, *, certificate: str | None, key: ApiKey | None, parallel: int, capacity: int, vocab_size: int
) -> ServersRollout:
    """Makes a rollout by one server of this project at `url`, http(s)://HOST:PORT. The server is never told to load
    weights. All completions are of the weights that the server has now: `connect` asks for their checksum, by a
    completion of one token. An answer of other weights counts as a failure of the server. No event loop may run in the
    caller's thread. Raises ValueError if `url` is no address, the key would go to another machine in plain text, or the
    file is no readable PEM; ServerError, a ValueError, if the server does not answer, refuses, or names no weights.

    Args:
      certificate, key: the path of the PEM file to trust, None for the system's; and the API key, None without one.
      parallel: the most calls at once.
      capacity, vocab_size: the most tokens of a prompt with its completion, and the number of token ids of the model.
    """
    client = Client(key=key, certificate=certificate, timeout=_TIMEOUT)
    url = client.check(url)
    checksum = asyncio.run(_weights_of(url, client))
    balance = Balance([url], client, KINDS["rpg_jax"], parallel=parallel, patience=_PATIENCE)
    balance.use(Loadable("", "", checksum))
    return ServersRollout(balance, ServersWeights(checksum), counters=True, capacity=capacity, vocab_size=vocab_size)


async def _weights_of(url: str, client: Client) -> int:
    """Asks a server for one token, and returns the checksum of its weights, which the answer has. Closes the client's
    connections. Raises ServerError if the server does not answer, refuses, or names no weights."""
    body = {"prompt": [0], "max_tokens": 1, "counters": [0, 0, 0, 0]}
    try:
        answer, _ = await Caller(url, client).post("/v1/completions", body)
        [name] = answer["weights"]
        return int(name, 16)
    except (Unavailable, Refused) as error:
        raise ServerError(str(error)) from None
    except (KeyError, TypeError, ValueError):
        raise ServerError(f"{url} does not say which weights it has: it must be python -m rpg_jax.serve") from None
    finally:
        await client.close()
