"""Small `Generate`s for tests: real ones, whose answers a function gives."""

from __future__ import annotations

from collections.abc import Callable

from draftsmith.data.conversations import Skip
from draftsmith.data.regenerate import Answer, Prompt


class Answering:
    """Answers the prompt that `choose` picks of those waiting, one a call; by default the newest."""

    def __init__(
        self,
        reply: Callable[[Prompt], Answer | Skip],
        window: int = 6,
        choose: Callable[[list[int]], int] = lambda tickets: tickets[-1],
    ) -> None:
        self._reply = reply
        self._choose = choose
        self.window = window
        self.waiting: dict[int, Prompt] = {}
        self.most_waiting = 0

    def start(self, ticket: int, prompt: Prompt) -> None:
        assert ticket not in self.waiting
        self.waiting[ticket] = prompt
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def finished(self) -> list[tuple[int, Answer | Skip]]:
        ticket = self._choose(list(self.waiting))
        return [(ticket, self._reply(self.waiting.pop(ticket)))]


def own(prompt: Prompt) -> Answer | Skip:
    """`own QUESTION`; the answer to q4.0 is cut."""
    question = str(prompt.messages[-1]["content"])
    return Answer(
        message={"role": "assistant", "content": f"own {question}"},
        finish_reason="length" if question == "q4.0" else "stop",
    )
