"""One layer of a graph for a reader: its role, state, weights and nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from deepinfer.commands.output import size, table
from deepinfer.graph.config import LayerSpec, ModelConfig
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.rewrite import users
from deepinfer.ir.types import Kind, Value

_EACH = {"num_pages": "page", "num_slots": "slot"}


@dataclass(frozen=True, slots=True)
class _Names:
    """How values are called in the view of the layer whose names begin with ``prefix``."""

    prefix: str
    makers: Mapping[Value, Node]

    def short(self, v: Value) -> str:
        """The name, with '.' for the layer's prefix."""
        text = str(v)
        inside = text[1:].startswith(self.prefix)
        return text[0] + text[len(self.prefix):] if inside else text

    def listed(self, values: Sequence[Value], *, types: bool = False) -> str:
        """Names separated by commas; parts of one thing as ``@w.{weight, scale}``."""
        parts = []
        for _, group in groupby(values, key=self._whole):
            together = [(self.short(v), f": {v.type}" if types else "") for v in group]
            stem = together[0][0].rpartition(".")[0]
            if len(together) > 1:
                inner = ", ".join(name.removeprefix(f"{stem}.") + kind for name, kind in together)
                parts.append(f"{stem}.{{{inner}}}")
            else:
                parts.append("".join(together[0]))
        return ", ".join(parts)

    def _whole(self, v: Value) -> object:
        """Equal for a weight and its scale, and for the outputs of one node."""
        stem, _, last = v.name.partition("|")[0].rpartition(".")
        if v.kind is Kind.WEIGHT and last in ("weight", "scale"):
            return stem
        return self.makers.get(v, v)


def role(cfg: ModelConfig, layer: LayerSpec) -> str:
    """What the layer is, in the words of spec §1.2."""
    if layer.index >= cfg.num_hidden_layers:
        return f"DSpark stage {layer.index - cfg.num_hidden_layers}, window attention only"
    kind = ("SWA" if not layer.ratio else "Full" if layer.is_kv_source
            else "Reindex" if layer.is_index_source else "Reuse")
    words = [kind, f"ratio {layer.ratio}" if layer.ratio else "window attention only"]
    words += ["KV source"] * layer.is_kv_source + ["index source"] * layer.is_index_source
    words += ["candidate source"] * (layer.candidates == "source")
    words += ["Engram"] * (layer.engram is not None)
    words += [f"DSpark tap {layer.tap}"] * layer.is_tap
    words += ["end of encoder"] * (layer.index == cfg.replay_cut - 1)
    words += ["start of decoder"] * (layer.index == cfg.replay_cut)
    return ", ".join(words)


def shares(cfg: ModelConfig, layer: LayerSpec) -> list[tuple[str, str]]:
    """What the layer hands to later ones or takes from earlier ones."""
    if not layer.ratio:
        return []
    rows = []
    for name, verb, source in (("KV", "compressed", layer.kv_source),
                               ("top-k", "selected", layer.index_source)):
        attribute = "kv_source" if name == "KV" else "index_source"
        readers = [x.index for x in cfg.layers if getattr(x, attribute) == layer.index]
        rows.append((name, f"{verb} here, read by layers {ranges(readers)}" if readers
                     else f"of layer {source}"))
    inside = [x.index for x in cfg.layers if x.candidates == "within"]
    if layer.candidates == "source":
        rows.append(("candidates", f"published here, layers {ranges(inside)} select within them"))
    elif layer.candidates == "within":
        rows.append(("candidates", f"of layer {cfg.candidate_source_layer_id}"))
    return rows


def ranges(numbers: list[int]) -> str:
    """``[20, 21, 22, 24]`` as ``20-22, 24``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) or "none"


def layer_text(cfg: ModelConfig, graph: Graph, layer: LayerSpec, stage: str) -> str:
    """A few dozen lines about one layer.

    Args:
        graph: of any stage of lowering. stage: what that is, for the title.
    """
    number = layer.index - cfg.num_hidden_layers
    prefix = f"mtp.{number}." if number >= 0 else f"layers.{layer.index}."
    nodes = [n for n in graph.nodes if f"{n.loc}.".startswith(prefix)]
    made = {v for n in nodes for v in n.outputs}
    read = list(dict.fromkeys(v for n in nodes for v in n.inputs))
    readers = users(graph)
    inside = set(map(id, nodes))
    leaves = [v for n in nodes for v in n.outputs if v in graph.outputs
              or any(id(r) not in inside for r in readers[v])]
    enters = [v for v in read if v.kind is Kind.TEMP and v not in made]

    names = _Names(prefix, {v: n for n in graph.nodes for v in n.outputs})
    yarn = layer.yarn
    head: list[tuple[str, str]] = [
        *shares(cfg, layer),
        ("rotation", f"base {layer.rope_base:g}" + (
            f", YaRN factor {yarn.factor:g} from {yarn.original_max_position_embeddings}"
            if yarn else "")),
        ("sizes", ", ".join(f"{s} <= {m}" for s, m in _symbols(nodes).items())),
        ("inputs", ", ".join(f"{v}: {v.type}" for v in read if v.kind is Kind.INPUT)),
        ("enters", ", ".join(f"{names.short(v)}: {v.type}" for v in enters)),
        ("leaves", ", ".join(f"{names.short(v)}: {v.type}" for v in leaves)),
    ]
    weights = [v for v in read if v.kind is Kind.WEIGHT]
    total = sum(v.type.nbytes() for v in weights if not v.name.startswith("derived."))
    lines = [f"{graph.name}, {stage}, {prefix[:-1]} of {cfg.num_hidden_layers} layers: "
             f"{role(cfg, layer)}", table(head, indent="  "),
             f"  ('.x' is short for '{prefix}x'; attributes at their defaults are left out)",
             "", "state", _values([v for v in read if v.kind is Kind.STATE], names, nodes),
             "", f"weights, {size(total)}", _values(weights, names, nodes)]
    for loc, group in groupby(nodes, key=lambda n: n.loc):
        lines += ["", loc, *(f"  {_node(n, names)}" for n in group)]
    return "\n".join(lines) + "\n"


def _symbols(nodes: list[Node]) -> dict[str, int]:
    return {s.name: s.max for n in nodes for v in (*n.inputs, *n.outputs)
            for s in v.type.symbols()}


def _values(values: list[Value], names: _Names, nodes: list[Node]) -> str:
    """One line for codes and their scales together: types, bytes, and who touches a state."""
    pairs: dict[str, list[Value]] = {}
    for v in values:
        stem = names.short(v).partition("|")[0]
        pairs.setdefault(re.sub(r"\.(weight|scale)$|_sf$", "", stem), []).append(v)
    one = dict.fromkeys(_symbols(nodes), 1)
    rows = []
    for stem, group in pairs.items():
        layouts = [v.name.partition("|")[2] for v in group]
        types = " + ".join(f"{v.type} as {layout}" if layout else str(v.type)
                           for v, layout in zip(group, layouts, strict=True))
        symbols = {s.name for v in group for s in v.type.symbols()}
        each = "".join(f" a {_EACH.get(s, s)}" for s in sorted(symbols))
        row = (stem, f"{size(sum(v.type.nbytes(one) for v in group))}{each}", types)
        if group[0].kind is Kind.STATE:
            ops = {n.op.name: group[0] in n.writes() for n in nodes if group[0] in n.inputs}
            did = ", ".join(f"{'written' if w else 'read'} by {op}" for op, w in ops.items())
            row = (*row[:2], f"{types}   {did}")
        rows.append(row)
    return table(rows, indent="  ") if rows else "  none"


def _node(node: Node, names: _Names) -> str:
    left = names.listed(node.outputs, types=True)
    defaults = node.op.defaults
    attrs = " ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}"
                     for k, v in node.attrs.items() if k not in defaults or defaults[k] != v)
    call = f"{node.op.name}({names.listed(node.inputs)})" + (f" {attrs}" if attrs else "")
    return f"{left} = {call}" if left else call
