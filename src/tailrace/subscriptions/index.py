"""Who has to hear of what: from a stream's name to the subscriptions it concerns."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.subscriptions.runner import SubscriptionRunner


class SubscriptionIndex:
    """Look-ups by name that cost nothing for streams nobody subscribes to."""

    def __init__(self) -> None:
        self.followers: dict[str, list[SubscriptionRunner]] = {}
        self.wake_streams: dict[str, list[SubscriptionRunner]] = {}
        self._globs: dict[
            str, list[SubscriptionRunner]
        ] = {}  # by the first segment of the pattern, "" if that is a star

    def add(self, agent: SubscriptionRunner) -> None:
        sub = agent.sub
        for path in sub.links:
            self.follow(path, agent)
        for index, key in self._places(agent):
            index.setdefault(key, []).append(agent)

    def remove(self, agent: SubscriptionRunner) -> None:
        for path in list(agent.sub.links):
            self.unfollow(path, agent)
        for index, key in self._places(agent):
            _remove_runner(index, key, agent)

    def follow(self, path: str, agent: SubscriptionRunner) -> None:
        agents = self.followers.setdefault(path, [])
        if agent not in agents:
            agents.append(agent)

    def unfollow(self, path: str, agent: SubscriptionRunner) -> None:
        _remove_runner(self.followers, path, agent)

    def wanting(self, name: str) -> list[SubscriptionRunner]:
        """The subscriptions whose pattern matches a name."""
        candidates = [*self._globs.get(name.partition("/")[0], ()), *self._globs.get("", ())]
        return [agent for agent in candidates if agent.sub.wants(name)]

    def concerned(self, name: str) -> list[SubscriptionRunner]:
        """Those that follow the stream, and those that would."""
        return list(dict.fromkeys([*self.followers.get(name, ()), *self.wanting(name)]))

    def _places(self, agent: SubscriptionRunner) -> Iterator[tuple[dict[str, list[SubscriptionRunner]], str]]:
        config = agent.config
        if config.pattern is not None:
            first = config.pattern.partition("/")[0]
            yield self._globs, "" if first in ("*", "**") else first
        if config.wake_stream is not None:
            yield self.wake_streams, config.wake_stream


def _remove_runner(index: dict[str, list[SubscriptionRunner]], key: str, agent: SubscriptionRunner) -> None:
    agents = index.get(key)
    if agents is not None and agent in agents:
        agents.remove(agent)
        if not agents:
            del index[key]
