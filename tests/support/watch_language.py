"""Random expressions of the language and random documents, to set two evaluations side by side."""

from __future__ import annotations

import json
import random
from typing import Any

NAMES = ("a", "b", "c", "list", "map", "flag", "text", "n")
ODD_NAMES = ("x-y", "with space", "quote'd", "slash/ed", "dot.ted", "ünï", "😀")
TEXTS = ("", "a", "b", "abc", "a'b", 'q"', "back\\slash", "line\nbreak", "😀", "é", "e\u0301", "ab😀c", "10")
INTS = (0, 1, -1, 2, 3, 7, 10, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63))
DOUBLES = (0.0, -0.0, 1.0, 1.5, -2.5, 3.0, 9007199254740992.0, 1e19, -1e19, 1e308, 0.1)


class Maker:
    """Everything comes from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    # -- documents

    def value(self, depth: int = 3) -> Any:
        pick = self.random.random()
        choice = self.random.choice
        if pick < 0.2:
            return choice(INTS)
        if pick < 0.35:
            return choice(DOUBLES)
        if pick < 0.6:
            return choice(TEXTS)
        if pick < 0.7:
            return choice((True, False))
        if pick < 0.77 or depth == 0:
            return None
        if pick < 0.9:
            return [self.value(depth - 1) for _ in range(self.random.randrange(4))]
        return {choice(NAMES): self.value(depth - 1) for _ in range(self.random.randrange(3))}

    def document(self) -> dict[str, Any]:
        names = [name for name in (*NAMES, *ODD_NAMES) if self.random.random() < 0.6]
        return {name: self.value() for name in names}

    # -- expressions

    def literal(self) -> str:
        pick = self.random.random()
        choice = self.random.choice
        if pick < 0.3:
            return str(choice(INTS))
        if pick < 0.45:
            return repr(choice(DOUBLES))
        if pick < 0.7:
            return quoted(choice(TEXTS))
        if pick < 0.85:
            return choice(("true", "false"))
        if pick < 0.9:
            return "null"
        return "[" + ", ".join(self.scalar() for _ in range(self.random.randrange(4))) + "]"

    def scalar(self) -> str:
        choice = self.random.choice
        return choice((str(choice(INTS)), repr(choice(DOUBLES)), quoted(choice(TEXTS)), "true", "null"))

    def field(self) -> str:
        pick = self.random.random()
        choice = self.random.choice
        if pick < 0.7:
            return f"doc.{choice(NAMES)}"
        if pick < 0.8:
            return f"doc[{quoted(choice(ODD_NAMES))}]"
        if pick < 0.9:
            return f"doc.{choice(NAMES)}.{choice(NAMES)}"
        return f"doc.{choice(NAMES)}[{choice(('0', '1', '5', '-1', '1.0', '1.5', quoted('a'), 'true'))}]"

    def operand(self, depth: int) -> str:
        pick = self.random.random()
        if depth <= 0 or pick < 0.45:
            return self.field()
        if pick < 0.7:
            return self.literal()
        if pick < 0.8:
            sign = self.random.choice("+-*/%")
            return f"({self.operand(depth - 1)} {sign} {self.operand(depth - 1)})"
        if pick < 0.86:
            return f"size({self.operand(depth - 1)})"
        if pick < 0.9:
            return f"(-{self.operand(depth - 1)})"
        if pick < 0.94:
            return f"({self.truth(depth - 1)} ? {self.operand(depth - 1)} : {self.operand(depth - 1)})"
        return f"({self.truth(depth - 1)})"

    def truth(self, depth: int = 4) -> str:
        pick = self.random.random()
        choice = self.random.choice
        if depth <= 0 or pick < 0.35:
            sign = choice(("==", "!=", "<", "<=", ">", ">="))
            return f"{self.operand(depth - 1)} {sign} {self.operand(depth - 1)}"
        if pick < 0.5:
            return f"({self.truth(depth - 1)} {choice(('&&', '||'))} {self.truth(depth - 1)})"
        if pick < 0.58:
            return f"!({self.truth(depth - 1)})"
        if pick < 0.65:
            return f"{self.operand(depth - 1)} in {self.operand(depth - 1)}"
        if pick < 0.72:
            return f"has(doc.{choice(NAMES)}" + (f".{choice(NAMES)})" if self.random.random() < 0.5 else ")")
        if pick < 0.8:
            function = choice(("contains", "startsWith", "endsWith"))
            return f"{self.field()}.{function}({self.operand(depth - 1)})"
        if pick < 0.85:
            return f"({self.truth(depth - 1)} ? {self.truth(depth - 1)} : {self.truth(depth - 1)})"
        if pick < 0.95:
            loop = choice(("exists", "all", "exists_one"))
            inner = choice((f"x == {self.literal()}", f"x > {self.literal()}", f"x in {self.field()}", "x"))
            if self.random.random() < 0.3:
                inner = f"({inner}) {choice(('&&', '||'))} {self.field()} == x"
            return f"{self.field()}.{loop}(x, {inner})"
        return self.field()


def quoted(text: str) -> str:
    """A CEL text; JSON's escapes are CEL's, too."""
    return json.dumps(text, ensure_ascii=False)
