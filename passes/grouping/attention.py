"""Groups of nodes that are attention in one kernel."""

from collections.abc import Mapping

from fusec.analysis.uses import Uses
from fusec.ir.graph import Node
from fusec.ir.ops import Trait
from fusec.loops.attention import NO_ATTENTION, attention_groups, has_linear_layer, instead_of_softmax
from fusec.passes.grouping.candidates import Candidates
from fusec.refusal import Refusal


class AttentionGroups:
    """Finds groups from a first matmul through a softmax to a second matmul."""

    def __init__(self, uses: Uses, candidates: Candidates, labels: Mapping[Node, str]) -> None:
        self.uses, self.candidates, self.labels = uses, candidates, labels

    def group_ending_at(self, node: Node) -> set[Node] | Refusal | None:
        """Return the group whose second matmul is ``node``, or why none is legal; None where there is no attention."""
        if not self.candidates.limits.small_m or not node.has(Trait.CONTRACTION):
            return None
        if (function := instead_of_softmax(node)) is not None:
            what = f"{self._described(function)} is between its matmuls, where attention has a softmax"
            return Refusal(f"{NO_ATTENTION}: {what}")
        refusals: dict[Refusal, None] = {}
        for found in attention_groups(node):
            group = {n for n in found if n not in self.uses.inlined}
            group |= self._decomposed_with(group)
            refusal = self._refusal(group, node)
            if refusal is None:
                return self._with_lookups(group)
            refusals[refusal] = None
        if len(refusals) == 1:
            return next(iter(refusals))
        return Refusal("; or ".join(refusal.reason for refusal in refusals)) if refusals else None

    def _with_lookups(self, group: set[Node]) -> set[Node]:
        """Return the group with the lookups that it alone reads, such as of pages, where that is legal."""
        read = {v.producer for n in group for v in self.uses.inputs(n)} - group
        found = {n for n in read if n is not None and n.has(Trait.LOOKUP) and not self.uses.escapes(n, group)}
        return group if not found or self.candidates.refusal(group | found) else group | found

    def _refusal(self, group: set[Node], last: Node) -> Refusal | None:
        """Return why a group from a first matmul to the last is not legal as attention in one kernel."""
        escaping = [n for n in group - {last} if self.uses.escapes(n, group)]
        if escaping:
            return self._other_use(self.uses.ordered(escaping)[-1], group)
        if has_linear_layer(group) and any(self.labels.get(n) != "attention" for n in group):
            return Refusal("its keys or values are weights")
        refusal = self.candidates.refusal(group)
        views = self._views_into(group) if refusal else []
        if views:
            # Folded into indices, a reshape that merges dims splits a loop in several; materialized, it does not.
            self.uses.materialize(*views)
            refusal = self.candidates.refusal(group)
            if refusal:
                self.uses.inline(*views)
            else:
                self._inline_again(views, group)
        return refusal

    def _other_use(self, node: Node, group: set[Node]) -> Refusal:
        """Return the refusal that names a value between the matmuls, and what else reads it."""
        readers = [n for n in self.uses.readers(node) if n not in group]
        what = f"{self._described(node)} between its matmuls"
        if not readers or any(n in self.uses.inlined for n in readers):
            return Refusal(f"{what} is also returned", "return only the result of the second matmul")
        return Refusal(f"{what} is also read by {self._described(readers[0])}")

    def _described(self, node: Node) -> str:
        """Return the operation of a node, the fusion that it comes from, and its line in the model."""
        fusion = self.labels.get(node, "")
        place = next((f"{s.file.rpartition('/')[2]}:{s.line}" for s in node.sources if s.file), "")
        about = ", ".join(part for part in (f"of {fusion}" if fusion else "", place) if part)
        return f"`{node.op.name}`" + (f" ({about})" if about else "")

    def _inline_again(self, views: list[Node], group: set[Node]) -> None:
        """Inline the views that need not be materialized, the nearest first: those may repeat keys and values."""
        for view in reversed(self.uses.ordered(views)):
            self.uses.inline(view)
            if self.candidates.refusal(group):
                self.uses.materialize(view)

    def _views_into(self, group: set[Node]) -> list[Node]:
        """Return the inlined reshapes that a group reads, if nothing in the group precedes them."""
        read = dict.fromkeys(v.producer for n in group for v in self.uses.inputs(n))
        views = [n for n in read if n is not None and n in self.uses.inlined and n.is_op("reshape")]
        return [n for n in views if group.isdisjoint(self.uses.predecessors(n))]

    def _decomposed_with(self, group: set[Node]) -> set[Node]:
        """Return the nodes of a decomposed attention that compute only operands of the group, such as its mask."""
        found: set[Node] = set()
        stack = list(group)
        while stack:
            for node in self.uses.predecessors(stack.pop()):
                own = self.labels.get(node) == "attention" and node not in group | found
                if own and (group | found).issuperset(self.uses.readers(node)):
                    found.add(node)
                    stack.append(node)
        return found
