"""Looks for many strings in a text that comes in pieces, at a cost that does not grow with their
number.

An Aho-Corasick automaton: a tree of all the strings, in which each node also knows the longest
other beginning of a string that the text read so far ends with. One step per character, and the
depth of the node is how much of the text may still turn out to be the beginning of a stop string.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence


class StopStrings:
    def __init__(self, strings: Sequence[str]):
        self.strings = strings
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.ends = [False]  # some string ends here
        for string in strings:
            self._insert(string)
        # the node of the longest shorter end of the same text
        self.shorter = [0] * len(self.children)
        self._link()

    def advance(self, node: int, text: str) -> int | None:
        """The node after the text; None when a string ended in it."""
        for character in text:
            while node and character not in self.children[node]:
                node = self.shorter[node]
            node = self.children[node].get(character, 0)
            if self.ends[node]:
                return None
        return node

    def first(self, text: str) -> tuple[int, str]:
        """(where, which) of the string that begins first in a text that holds one."""
        return min((at, string) for string in self.strings if (at := text.find(string)) >= 0)

    def _insert(self, string: str) -> None:
        node = 0
        for character in string:
            if character not in self.children[node]:
                self.children[node][character] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self.ends.append(False)
            node = self.children[node][character]
        self.ends[node] = True

    def _link(self) -> None:
        """Breadth first: the links of a node come from those of shorter ones."""
        waiting = deque(self.children[0].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self.children[node].items():
                link = self.shorter[node]
                while link and character not in self.children[link]:
                    link = self.shorter[link]
                self.shorter[child] = self.children[link].get(character, 0)
                self.ends[child] = self.ends[child] or self.ends[self.shorter[child]]
                waiting.append(child)


@functools.lru_cache(maxsize=64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The samples of a request, and requests alike, share one."""
    return StopStrings(strings)
