"""The names that a chat template reads: what a caller may hand to it.

jinja2.meta.find_undeclared_variables also reports names that all paths of the template set before
they read them, such as `content` in Qwen3's; a value for one of these would be ignored.
"""

from collections.abc import Sequence

from jinja2 import nodes
from jinja2.visitor import NodeVisitor


def names_read(template: nodes.Template) -> set[str]:
    """Return the names that some path through a parsed template reads before it sets them."""
    reader = _Reader()
    reader.visit(template)
    return reader.read


class _Reader(NodeVisitor):
    """Walks through a template in the order in which it is rendered.

    Names that are set inside of a loop or a macro are unknown behind it, as in Jinja.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self._known: set[str] = set()

    def visit_Name(self, node: nodes.Name) -> None:
        if node.ctx != "load":  # it is set, or a parameter
            self._known.add(node.name)
        elif node.name not in self._known:
            self.read.add(node.name)

    def visit_Assign(self, node: nodes.Assign) -> None:
        self.visit(node.node)
        self.visit(node.target)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> None:
        if node.filter is not None:
            self.visit(node.filter)
        self._visit_inside(node.body)
        self.visit(node.target)

    def visit_If(self, node: nodes.If) -> None:
        branches = [node.body, node.else_]
        self.visit(node.test)
        for branch in node.elif_:
            self.visit(branch.test)
            branches.append(branch.body)
        known_behind = [self._visit_inside(branch) for branch in branches]
        self._known = set.intersection(*known_behind)

    def visit_For(self, node: nodes.For) -> None:
        self.visit(node.iter)
        condition = [] if node.test is None else [node.test]
        loop = nodes.Name("loop", "store")
        self._visit_inside([node.target, loop, *condition, *node.body])
        self._visit_inside(node.else_)

    def visit_Macro(self, node: nodes.Macro) -> None:
        self._known.add(node.name)
        self._visit_callable(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> None:
        self.visit(node.call)
        self._visit_callable(node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> None:
        self.visit(node.filter)
        self._visit_inside(node.body)

    def visit_With(self, node: nodes.With) -> None:
        for value in node.values:
            self.visit(value)
        self._visit_inside([*node.targets, *node.body])

    def _visit_callable(self, node: nodes.Macro | nodes.CallBlock) -> None:
        """Visit parameters, defaults and body of a macro, or of the block of a call."""
        own = [nodes.Name(name, "param") for name in ("caller", "varargs", "kwargs")]
        self._visit_inside([*node.args, *own, *node.defaults, *node.body])

    def _visit_inside(self, body: Sequence[nodes.Node]) -> set[str]:
        """Visit nodes one after another; return the names that are known behind them, and forget
        those that they set.
        """
        outside = self._known.copy()
        for node in body:
            self.visit(node)
        known, self._known = self._known, outside
        return known
