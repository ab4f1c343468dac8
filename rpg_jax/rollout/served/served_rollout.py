"""The trainer's side: a rollout whose completions come from servers."""

from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from rpg_jax.rollout.interface import Request, Rollout
from rpg_jax.rollout.served.answers import Question
from rpg_jax.rollout.served.balance import Balance, Stopped
from rpg_jax.rollout.served.calls import Batch
from rpg_jax.rollout.served.deployed import Deployed
from rpg_jax.types import Completion


class ServedRollout(Rollout):
    """One call of a server for each completion, as many at once as there is room for.

    Servers load the weights before they sample with them, each when it is asked first.

    Args:
      model: the name under which servers have the model; None for their only one.
      counters: servers draw this project's random numbers, see `Kind`.
      capacity: most tokens of a prompt and its completion.
    """

    apart = True

    def __init__(
        self,
        balance: Balance,
        weights: Deployed,
        *,
        model: str | None = None,
        counters: bool = False,
        capacity: int,
        vocab_size: int,
    ):
        self.weights, self._balance = weights, balance
        self._model, self._counters = model, counters
        self._capacity, self._vocab_size = capacity, vocab_size
        self._pool = ThreadPoolExecutor(balance.room, thread_name_prefix="rpg-served")

    def generate(self, request: Request) -> list[list[Completion]]:
        request.check_one_turn("a server")
        request.check_fits(capacity=self._capacity, vocab_size=self._vocab_size)
        groups: list[list[Completion]] = [[] for _ in request.prompts]
        places = [place for place in range(len(groups)) if place not in request.done]
        wanted = len(places) if request.enough is None else request.enough
        batch, version = Batch(), self.weights.version
        made: dict[int, dict[int, Completion]] = {place: {} for place in places}
        self._balance.begin()
        asked: dict[Future[Completion], tuple[int, int]] = {}
        try:
            for place in places if wanted else ():
                for index in range(request.group_size):
                    asked[self._pool.submit(self._one, request, place, index, batch, version)] = place, index
            for future in as_completed(asked):
                place, index = asked[future]
                made[place][index] = future.result()
                if len(made[place]) < request.group_size:
                    continue
                groups[place] = [made[place][i] for i in range(request.group_size)]
                if request.on_group is not None:
                    request.on_group(place, groups[place])
                wanted -= 1
                if not wanted:
                    break
        finally:
            for future in asked:
                future.cancel()
            self._balance.end(batch)
        return groups

    def take_counts(self) -> dict[str, float]:
        """Metrics of the servers since the last call."""
        return {f"servers/{name}": value for name, value in self._balance.counts().items()}

    def close(self) -> None:
        self._balance.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, request: Request, place: int, index: int, batch: Batch, version: int) -> Completion:
        if batch.stopped:
            raise Stopped
        question = Question(request, place, index, self._model, self._counters)
        return self._balance.ask(
            question.body, lambda answer: question.completion(answer, version, self._vocab_size), batch
        )
