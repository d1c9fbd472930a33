r"""Read a scalar formula, in LaTeX or plain text, into a tree.

An own reader, since it must neither evaluate while it reads nor guess: math-verify's lowers the case of symbols, takes
the decimal for an approximation's exact side, and eats letters that look like units. What it doesn't know (integrals,
sums, limits) is left to math-verify, see `algebra`.

`2\pi r^2 + \frac{1}{2}` becomes `Node("add", (Node("mul", ...), Node("div", ...)))`.
"""

import re
from fractions import Fraction
from typing import NamedTuple


class Unreadable(Exception):
    """Raised for a text that is no formula."""


class Unsupported(Unreadable):
    """Raised for a formula that only a computer algebra system can read."""


class Node(NamedTuple):
    """Node of a formula.

    Attributes:
        kind: `number`, `symbol`, `constant`, `add`, `mul`, `div`, `pow`, `neg`, `factorial`, `call` (a known function)
            or `apply` (an unknown one).
        children: Operands.
        name: Of a symbol, constant or function.
        value: Of a number.
    """

    kind: str
    children: tuple["Node", ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


MAX_CHARACTERS = 3000
_MAX_DEPTH = 60  # of brackets
_MAX_LEVELS = 400
_MAX_DIGITS = 4000

_GREEK_WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega"
).split()
_FUNCTIONS = {
    name: name
    for name in (
        "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc arsinh arcosh artanh exp ln log lg "
        "sqrt cbrt abs floor ceil max min gcd lcm binom sgn Re Im"
    ).split()
} | {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "asinh": "arsinh",
    "acosh": "arcosh",
    "atanh": "artanh",
    "arcsinh": "arsinh",
    "arccosh": "arcosh",
    "arctanh": "artanh",
    "cosec": "csc",
    "tg": "tan",
    "ctg": "cot",
    "sign": "sgn",
    "ceiling": "ceil",
}
_INVERSES = {
    "sin": "arcsin",
    "cos": "arccos",
    "tan": "arctan",
    "cot": "arccot",
    "sec": "arcsec",
    "csc": "arccsc",
    "sinh": "arsinh",
    "cosh": "arcosh",
    "tanh": "artanh",
}
_MANY_ARGUMENTS = frozenset(("max", "min", "gcd", "lcm", "binom", "log"))
_COMPARING = frozenset(("max", "min", "gcd", "lcm"))
_CONSTANT_WORDS = {"pi": "pi", "infinity": "infinity", "inf": "infinity", "e": "e", "i": "i"}
_APPLICABLE = frozenset("f g h F G H W P Q Γ Phi phi psi Psi zeta Gamma varphi".split())
_LETTERS = re.compile(
    "|".join(sorted((*_FUNCTIONS, *_GREEK_WORDS, "infinity", "inf", "pi"), key=len, reverse=True))
    + "|[A-Z]{2,}|[A-Za-z]"  # AB is a segment or a product of matrices: BA may be something else
)
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\d.]))?)"
    r"|(?P<command>\\[A-Za-z]+|\\[{}|%])|(?P<letters>[A-Za-z]+)|(?P<other>\*\*|\S))"
)
_UNSUPPORTED = frozenset(
    r"\int \iint \iiint \oint \sum \prod \lim \limsup \liminf \partial \nabla \det \sup \inf".split()
)
_DERIVATIVE = re.compile(r"\\frac\{d(?:\^\d)?[^{}]*\}\{d[A-Za-z]")
_SYMBOL_COMMANDS = frozenset(
    rf"\{name}"
    for name in (*_GREEK_WORDS, "varphi", "varepsilon", "vartheta", "ell", "hbar", "Delta", "Omega", "Sigma")
) | frozenset(r"\Theta \Phi \Gamma \Lambda \Psi \Pi \Xi \aleph".split())
_NAMED_GROUPS = frozenset(
    r"\vec \hat \bar \tilde \mathbb \mathcal \mathfrak \mathscr \overrightarrow \overline \widehat \dot \ddot \angle".split()
)
_PRODUCT_SIGNS = frozenset(("*", r"\cdot", r"\times", r"\ast"))
_QUOTIENT_SIGNS = frozenset(("/", r"\div", ":"))
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}

Token = tuple[str, str]
_END: Token = ("end", "")


def read_formula(text: str) -> Node:
    """Return the tree of a normalised text.

    Raises:
        Unsupported: If it holds what only a computer algebra system can read.
        Unreadable: If it is no formula, or too long, or nested too deep.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"longer than {MAX_CHARACTERS} characters")
    if _DERIVATIVE.search(text):
        raise Unsupported("needs computer algebra")
    reader = _Reader(_tokens(text))
    node = reader.sum()
    if reader.token is not _END:
        raise Unreadable(f"unexpected {reader.token[1]!r}")
    if _is_deep(node):
        raise Unreadable(f"a tree of more than {_MAX_LEVELS} levels")
    return node


def _is_deep(node: Node) -> bool:
    """Whether what walks down the tree would run out of stack: a product is a level for each factor."""
    level, num_levels = [node], 0
    while level and num_levels <= _MAX_LEVELS:
        level = [child for each in level for child in each.children]
        num_levels += 1
    return bool(level)


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            break
        position = match.end()
        kind = str(match.lastgroup)
        if kind == "letters":
            tokens += [("letters", part) for part in _LETTERS.findall(match["letters"])]
        else:
            tokens.append((kind, match[kind]))
    if any(token[1] in _UNSUPPORTED for token in tokens):
        raise Unsupported("needs computer algebra")
    return [*tokens, _END]


class _Reader:
    """Recursive descent over the tokens of one formula."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.position, self.depth, self.bars = tokens, 0, 0, 0

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def take(self) -> Token:
        token = self.token
        if token is _END:
            raise Unreadable("ends too early")
        self.position += 1
        return token

    def expect(self, text: str) -> None:
        if self.take()[1] != text:
            raise Unreadable(f"no {text!r} where it belongs")

    # sums and products

    def sum(self) -> Node:
        terms = [self.product()]
        while self.token[1] in ("+", "-"):
            negative = self.take()[1] == "-"
            term = self.product()
            terms.append(Node("neg", (term,)) if negative else term)
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def product(self) -> Node:
        result = self.signed()
        while True:
            sign = self.token[1]
            if sign in _PRODUCT_SIGNS:
                self.take()
                result = Node("mul", (result, self.signed()))
            elif sign in _QUOTIENT_SIGNS:
                self.take()
                result = Node("div", (result, self.signed()))
            elif (self.begins_factor() and self.token[0] != "number") or (
                self.token[0] == "number" and self.tokens[self.position - 1][1] in (")", "]", "}")
            ):
                result = Node("mul", (result, self.power()))
            else:
                return result

    def signed(self) -> Node:
        negative = False
        for _ in range(_MAX_DEPTH):
            if self.token[1] not in ("+", "-"):
                break
            negative ^= self.take()[1] == "-"
        node = self.power()
        return Node("neg", (node,)) if negative else node

    def begins_factor(self) -> bool:
        kind, text = self.token
        if kind in ("number", "letters"):
            return True
        if text == "|":
            return self.bars == 0
        if text in ("(", "[", "{", "i", r"\{"):
            return True
        return kind == "command" and (
            text in _SYMBOL_COMMANDS
            or text in _NAMED_GROUPS
            or text[1:] in _FUNCTIONS
            or text
            in (r"\frac", r"\sqrt", r"\surd", r"\pi", r"\binom", r"\infty", r"\lfloor", r"\lceil", r"\operatorname")
        )

    # powers and what follows a factor

    def power(self) -> Node:
        node = self.postfix(self.factor())
        if self.token[1] in ("^", "**"):
            self.take()
            if self.token[1] == r"\circ":
                self.take()
                node = self.postfix(Node("mul", (node, _DEGREE)))
            else:
                node = Node("pow", (node, self.exponent()))
                node = self.postfix(node)
        return node

    def exponent(self) -> Node:
        self.depth += 1  # 2^2^2^... recurs without brackets
        node = self.signed()
        self.depth -= 1
        return node

    def postfix(self, node: Node) -> Node:
        while self.token[1] in ("!", "%", r"\%"):
            if self.take()[1] == "!":
                doubled = self.token[1] == "!"
                if doubled:
                    self.take()
                node = Node("call", (node,), "double factorial") if doubled else Node("factorial", (node,))
            else:
                node = Node("div", (node, _number(100)))
        return node

    def factor(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise Unreadable(f"nested more than {_MAX_DEPTH} deep")
        node = self.inner_factor()
        self.depth -= 1
        return node

    def inner_factor(self) -> Node:
        kind, text = self.take()
        if kind == "number":
            if len(text) > _MAX_DIGITS:
                raise Unreadable("number too long")
            return Node("number", value=Fraction(text))
        if kind == "letters":
            return self.word(text)
        if text in _CLOSING:
            return self.group(_CLOSING[text])
        if text == "|":
            return self.absolute()
        if kind == "command":
            return self.command(text)
        raise Unreadable(f"unexpected {text!r}")

    def group(self, closing: str) -> Node:
        bars, self.bars = self.bars, 0
        node = self.sum()
        self.expect(closing)
        self.bars = bars
        return node

    def absolute(self) -> Node:
        self.bars += 1
        node = self.sum()
        self.expect("|")
        self.bars -= 1
        return Node("call", (node,), "abs")

    # names

    def word(self, text: str) -> Node:
        if text in _FUNCTIONS and len(text) > 1:
            return self.function(_FUNCTIONS[text])
        if text in _CONSTANT_WORDS and self.token[1] != "_":
            return Node("constant", name=_CONSTANT_WORDS[text])
        return self.symbol(text)

    def command(self, text: str) -> Node:
        name = text[1:]
        match text:
            case r"\frac":
                return Node("div", (self.argument(), self.argument()))
            case r"\binom":
                return Node("call", (self.argument(), self.argument()), "binom")
            case r"\sqrt" | r"\surd":
                return self.root()
            case r"\lfloor" | r"\lceil":
                node = self.sum()
                self.expect(text.replace("l", "r", 1))
                return Node("call", (node,), {"lfloor": "floor", "lceil": "ceil"}[name])
            case r"\pi" | r"\infty":
                return Node("constant", name={"pi": "pi", "infty": "infinity"}[name])
        if name in _FUNCTIONS:
            return self.function(_FUNCTIONS[name])
        if text in _SYMBOL_COMMANDS:
            return self.symbol(name)
        if text in _NAMED_GROUPS:
            return self.symbol(f"{name}{{{self.raw_group()}}}")
        raise Unreadable(f"unknown {text}")

    def symbol(self, name: str) -> Node:
        while self.token[1] in ("_", "'"):
            if self.take()[1] == "'":
                name += "'"
            else:
                name += f"_{self.raw_group()}"
        if self.token[1] == "(" and (name.rstrip("'").partition("_")[0] in _APPLICABLE or name.endswith("'")):
            self.take()
            return Node("apply", self.arguments(")"), name)
        return Node("symbol", name=name)

    def raw_group(self) -> str:
        """Text of a group or single token, for a name."""
        opening = self.take()[1]
        if opening != "{":
            return opening
        parts: list[str] = []
        depth = 1
        while depth:
            part = self.take()[1]
            depth += (part == "{") - (part == "}")
            parts.append(part)
        return "".join(parts[:-1])

    def argument(self) -> Node:
        """Argument of a LaTeX command: a group or one token."""
        kind, text = self.token
        if text == "{":
            self.take()
            return self.group("}")
        if kind == "number" and text.isdigit() and len(text) > 1:  # \frac 12 has the arguments 1 and 2
            self.tokens[self.position] = ("number", text[1:])
            return Node("number", value=Fraction(text[0]))
        return self.factor()

    def arguments(self, closing: str) -> tuple[Node, ...]:
        bars, self.bars = self.bars, 0
        nodes = [self.sum()]
        while self.token[1] == ",":
            self.take()
            nodes.append(self.sum())
        self.expect(closing)
        self.bars = bars
        return tuple(nodes)

    def root(self) -> Node:
        degree = None
        if self.token[1] == "[":
            self.take()
            degree = self.group("]")
        radicand = self.argument()
        half = Node("div", (_number(1), degree or _number(2)))
        return Node("pow", (radicand, half))

    def function(self, name: str) -> Node:
        base = exponent = None
        for _ in range(2):
            if self.token[1] == "_" and base is None:
                self.take()
                base = self.argument()
            elif self.token[1] in ("^", "**") and exponent is None:
                self.take()
                exponent = self.exponent()
        if name == "sqrt":
            return Node("pow", (self.argument(), Node("div", (_number(1), _number(2)))))
        if name == "cbrt":
            return Node("pow", (self.argument(), Node("div", (_number(1), _number(3)))))
        arguments = self.function_arguments(name)
        if name in _COMPARING and len(arguments) == 1:
            raise Unreadable(f"{name} of one value")  # "max 5, min 2" are labels
        if exponent == Node("neg", (_number(1),)) and name in _INVERSES:
            name, exponent = _INVERSES[name], None
        if base is not None:
            if name != "log":
                raise Unreadable(f"{name} with an index")
            arguments = (*arguments, base)
        node = Node("call", arguments, name)
        return node if exponent is None else Node("pow", (node, exponent))

    def function_arguments(self, name: str) -> tuple[Node, ...]:
        opening = self.token[1]
        if opening in _CLOSING:
            self.take()
            if name in _MANY_ARGUMENTS:
                if name == "binom" and opening == "{":
                    first = self.group("}")
                    return first, self.argument()
                return self.arguments(_CLOSING[opening])
            return (self.group(_CLOSING[opening]),)
        if opening == "|":
            self.take()
            return (self.absolute(),)
        return (self.open_argument(),)

    def open_argument(self) -> Node:
        r"""Argument without brackets: `\sin 2x` up to the next sign or function."""
        node = self.signed()
        while self.begins_factor() and self.token[0] != "number" and not self.is_function():
            if self.token[1] in ("(", "[") and node.kind != "number":
                break
            node = Node("mul", (node, self.power()))
        return node

    def is_function(self) -> bool:
        kind, text = self.token
        return (kind == "letters" and text in _FUNCTIONS) or (kind == "command" and text[1:] in _FUNCTIONS)


def _number(value: int) -> Node:
    return Node("number", value=Fraction(value))


_DEGREE = Node("div", (Node("constant", name="pi"), _number(180)))


def symbols(node: Node) -> set[str]:
    """Names of the symbols in a formula."""
    found: set[str] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node.kind == "symbol":
            found.add(node.name)
        stack.extend(node.children)
    return found


def contains(node: Node, kind: str, name: str) -> bool:
    """Whether a formula holds a node of that kind and name."""
    stack = [node]
    while stack:
        node = stack.pop()
        if node.kind == kind and node.name == name:
            return True
        stack.extend(node.children)
    return False
