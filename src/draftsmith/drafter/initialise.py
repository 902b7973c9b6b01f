"""A drafter's start from its target: copies of the last full-attention decoder layers, where they fit.

Everything is read from the modules themselves (children by name, weights by shape, norms by what they do to a vector of
ones), so that no family needs a line of its own; what doesn't fit keeps its random start, and the report says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from draftsmith.drafter.model import FULL, Attention, Drafter, DrafterConfig, Layer, RMSNorm

NORM_TOLERANCE = 1e-4
"""A norm's answer to ones is its effective weight up to eps, computed in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitReport:
    """Where each drafter layer starts from and what of it was copied."""

    sources: tuple[int | None, ...]
    """Per drafter layer, the target layer it starts from; None where the target had too few."""
    copied: tuple[str, ...]
    left: tuple[str, ...]
    """What kept its random start, or has no counterpart in a drafter, and why."""

    def lines(self) -> list[str]:
        """The report as people read it."""
        pairs = [f"{index} from {source}" for index, source in enumerate(self.sources) if source is not None]
        return [
            "drafter layers start from target layers: " + (", ".join(pairs) or "none"),
            *(f"copied: {text}" for text in self.copied),
            *(f"not copied: {text}" for text in self.left),
        ]


@dataclass(slots=True)
class _Notes:
    """Messages with the drafter layers they hold for, in the order met."""

    copied: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    left: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def take(self, layer: int, part: str, problem: str | None) -> bool:
        """Note `part` as copied, or why not; whether it may be copied."""
        if problem is None:
            self.copied.setdefault(part, []).append(layer)
        else:
            self.left.setdefault(f"{part}: {problem}", []).append(layer)
        return problem is None


@torch.no_grad()
def init_from_target(
    drafter: Drafter, layers: Sequence[nn.Module], final_norm: nn.Module, layer_types: Sequence[str]
) -> InitReport:
    """Overwrite a randomly started drafter, in place, with what it can take over from its target.

    Args:
        drafter: fresh from `init_weights`.
        layers: the target's decoder layers, all of them.
        final_norm: the target's norm before its head.
        layer_types: per target layer, "full_attention" or another kind; other kinds are never copied.

    Returns:
        What was copied and what was not. The last drafter layer takes the target's last full-attention layer, the one
        before it the one before, and so on; drafter layers beyond their number keep their random start.

    `fc` passes the last tap through at first: identity on that tap's columns, the random start shrunk to rows of norm
    0.02 beside it. `hidden_norm` takes the mean of the copied layers' input norms, since their keys and values were
    made to read states scaled so. Biases are never copied: a drafter has none.
    """
    config = drafter.config
    full = [index for index, kind in enumerate(layer_types) if kind == FULL][-config.num_layers :]
    sources: list[int | None] = [None] * (config.num_layers - len(full)) + list(full)
    notes = _Notes()
    input_norms: list[Tensor] = []
    for index, source in enumerate(sources):
        layer = cast(Layer, drafter.layers[index])
        if source is None:
            notes.take(index, "layer", f"the target has only {len(full)} full-attention layers")
            continue
        children = dict(layers[source].named_children())
        _copy_norms(layer, children, notes, index)
        _copy_attention(layer.self_attn, children, config, notes, index)
        _copy_mlp(layer, children, config, notes, index)
        weight = _norm_weight(children["input_layernorm"]) if "input_layernorm" in children else None
        if weight is not None and weight.shape == layer.input_layernorm.weight.shape:
            input_norms.append(weight)
    _start_context(drafter, input_norms)
    copied, left = _grouped(notes.copied), _grouped(notes.left)
    copied.append(f"fc: passes the last tap (target layer {config.taps[-1]}) through")
    if input_norms:
        copied.append("hidden_norm: mean of the copied layers' input norms")
    problem = _copy_norm(drafter.norm, final_norm)
    if problem is None:
        copied.append("norm")
    else:
        left.append(f"norm: {problem}")
    return InitReport(sources=tuple(sources), copied=tuple(copied), left=tuple(left))


def _grouped(notes: dict[str, list[int]]) -> list[str]:
    """Notes as text, each with its drafter layers."""
    return [f"{text} (layers {', '.join(map(str, found))})" for text, found in notes.items()]


def _start_context(drafter: Drafter, input_norms: list[Tensor]) -> None:
    weight = drafter.fc.weight
    width, columns = weight.shape
    # At its usual 0.02 the random part would outweigh the tap it stands beside (25,600 columns of it in a large one).
    weight.mul_(columns**-0.5)
    weight[:, columns - width :].add_(torch.eye(width, dtype=weight.dtype, device=weight.device))
    if input_norms:
        drafter.hidden_norm.weight.copy_(torch.stack([norm.cpu() for norm in input_norms]).mean(0))


def _norm_weight(norm: nn.Module) -> Tensor | None:
    """The fp32 weight w of `norm(x) = x / rms(x) * w`, 1 + w stored as w included; None for any other norm."""
    stored = dict(norm.named_parameters())
    if set(stored) != {"weight"} or stored["weight"].ndim != 1:
        return None
    weight = stored["weight"].detach().float()
    ones = torch.ones(1, weight.numel(), dtype=stored["weight"].dtype, device=weight.device)
    # `forward` and not a call: a hook on the target's norm must not take this for its own data.
    answer = cast(Tensor, norm.forward(ones))[0].float()
    tolerance = NORM_TOLERANCE if stored["weight"].dtype == torch.float32 else 2e-2
    nearest = min((weight, 1.0 + weight), key=lambda candidate: (answer - candidate).abs().sum().item())
    return nearest if torch.allclose(answer, nearest, rtol=tolerance, atol=tolerance) else None


def _copy_norm(ours: RMSNorm, theirs: nn.Module | None) -> str | None:
    """Copy a norm's effective weight; the reason where it can't be."""
    if theirs is None:
        return "the target has none there"
    weight = _norm_weight(theirs)
    if weight is None:
        return f"{type(theirs).__name__} is not an RMSNorm"
    if weight.shape != ours.weight.shape:
        return f"the target's has {weight.numel()} weights, the drafter's {ours.weight.numel()}"
    ours.weight.copy_(weight)
    return None


def _copy_norms(layer: Layer, children: dict[str, nn.Module], notes: _Notes, index: int) -> None:
    """The norms before attention and before the MLP; norms of what comes out of them have no counterpart."""
    used = {"input_layernorm"}
    notes.take(index, "input_layernorm", _copy_norm(layer.input_layernorm, children.get("input_layernorm")))
    # Families with norms on both sides call the one before the MLP otherwise, and this name means one after attention.
    before_mlp = "post_attention_layernorm"
    if "pre_feedforward_layernorm" in children:
        before_mlp = "pre_feedforward_layernorm"
    elif "input_layernorm" not in children:
        before_mlp = ""
    used.add(before_mlp)
    problem = _copy_norm(layer.post_attention_layernorm, children.get(before_mlp))
    notes.take(index, "post_attention_layernorm", problem)
    for name in children:
        if "norm" in name and name not in used:
            notes.take(index, f"the target's {name}", "a drafter has no such norm")


def _weight(modules: dict[str, nn.Module], name: str, shape: tuple[int, ...]) -> tuple[Tensor | None, str | None]:
    """The weight of child `name` in fp32 where it is plain and of `shape`, else the reason."""
    if name not in modules:
        return None, f"the target has no {name}"
    weight = dict(modules[name].named_parameters(recurse=False)).get("weight")
    if weight is None or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return None, "the target's is quantised"
    if tuple(weight.shape) != shape:
        return None, f"the target's is {list(weight.shape)}, the drafter's needs {list(shape)}"
    return weight.detach().float(), None


def _copy_attention(
    ours: Attention, children: dict[str, nn.Module], config: DrafterConfig, notes: _Notes, index: int
) -> None:
    if "self_attn" not in children:
        notes.take(index, "self_attn", "the target's layer has none")
        return
    theirs = dict(children["self_attn"].named_children())
    head_dim = vars(children["self_attn"]).get("head_dim")
    if isinstance(head_dim, int) and head_dim != config.head_dim:
        notes.take(index, "self_attn", f"heads of {head_dim} in the target, of {config.head_dim} in the drafter")
        return
    H, query_rows, key_rows = config.hidden_size, config.num_heads * config.head_dim, ours.kv_proj.out_features // 2
    if "qkv_proj" in theirs:
        fused, problem = _weight(theirs, "qkv_proj", (query_rows + 2 * key_rows, H))
        # As many rows in all may be split otherwise among queries, keys and values.
        problem = problem or _other_heads(theirs, query_rows)
        fused = fused if problem is None else None
        for part in ("self_attn.q_proj", "self_attn.kv_proj"):
            notes.take(index, part, problem)
        if fused is not None:
            ours.q_proj.weight.copy_(fused[:query_rows])
            ours.kv_proj.weight.copy_(fused[query_rows:])
    else:
        _copy_query(ours, theirs, config, notes, index)
        keys, key_problem = _weight(theirs, "k_proj", (key_rows, H))
        values, value_problem = _weight(theirs, "v_proj", (key_rows, H))
        notes.take(index, "self_attn.kv_proj", key_problem or value_problem)
        if keys is not None and values is not None:
            ours.kv_proj.weight[:key_rows].copy_(keys)
            ours.kv_proj.weight[key_rows:].copy_(values)
    out, problem = _weight(theirs, "o_proj", (H, query_rows))
    if notes.take(index, "self_attn.o_proj", problem) and out is not None:
        ours.o_proj.weight.copy_(out)
    for name, norm in (("q_norm", ours.q_norm), ("k_norm", ours.k_norm)):
        notes.take(index, f"self_attn.{name}", _copy_norm(norm, theirs.get(name)))
    _note_biases(children["self_attn"], "self_attn", notes, index)


def _other_heads(theirs: dict[str, nn.Module], rows: int) -> str | None:
    """Why queries can't be taken over though their matrix fits: the output projection reads another width."""
    found = dict(theirs["o_proj"].named_parameters(recurse=False)).get("weight") if "o_proj" in theirs else None
    if found is None or not found.is_floating_point() or found.ndim != 2 or found.shape[1] == rows:
        return None
    return f"the target's heads are {found.shape[1]} wide together, the drafter's {rows}"


def _copy_query(
    ours: Attention, theirs: dict[str, nn.Module], config: DrafterConfig, notes: _Notes, index: int
) -> None:
    """Query rows; of a gated projection, whose heads hold [query; gate], the query half of every head."""
    H, rows = config.hidden_size, config.num_heads * config.head_dim
    query, problem = _weight(theirs, "q_proj", (rows, H))
    if query is not None:
        # A gated projection is as tall as twice the heads would be.
        problem = _other_heads(theirs, rows)
        query = query if problem is None else None
    if query is None:
        gated, _ = _weight(theirs, "q_proj", (2 * rows, H))
        # Twice the heads would be as tall: gated only where the output projection still reads `rows`.
        if gated is not None and _weight(theirs, "o_proj", (H, rows))[0] is not None:
            query = gated.view(config.num_heads, 2, config.head_dim, H)[:, 0].reshape(rows, H)
            notes.take(index, "the gates in the target's q_proj", "a drafter's attention has none")
    if query is not None:
        ours.q_proj.weight.copy_(query)
    notes.take(index, "self_attn.q_proj", problem if query is None else None)


def _copy_mlp(layer: Layer, children: dict[str, nn.Module], config: DrafterConfig, notes: _Notes, index: int) -> None:
    if "mlp" not in children:
        notes.take(index, "mlp", "the target's layer has none of that name")
        return
    theirs = dict(children["mlp"].named_children())
    if "experts" in theirs:
        notes.take(index, "mlp", "the target's is a mixture of experts")
        return
    H, rows = config.hidden_size, config.intermediate_size
    gate_up = layer.mlp.gate_up_proj.weight
    if "gate_up_proj" in theirs:
        fused, problem = _weight(theirs, "gate_up_proj", (2 * rows, H))
        if notes.take(index, "mlp.gate_up_proj", problem) and fused is not None:
            gate_up.copy_(fused)
    else:
        gate, gate_problem = _weight(theirs, "gate_proj", (rows, H))
        up, up_problem = _weight(theirs, "up_proj", (rows, H))
        notes.take(index, "mlp.gate_up_proj", gate_problem or up_problem)
        if gate is not None and up is not None:
            gate_up[:rows].copy_(gate)
            gate_up[rows:].copy_(up)
    down, problem = _weight(theirs, "down_proj", (H, rows))
    if notes.take(index, "mlp.down_proj", problem) and down is not None:
        layer.mlp.down_proj.weight.copy_(down)
    _note_biases(children["mlp"], "mlp", notes, index)


def _note_biases(module: nn.Module, part: str, notes: _Notes, index: int) -> None:
    biased = sorted(name for name, _ in module.named_parameters() if name.endswith("bias"))
    if biased:
        notes.take(index, f"{part} {', '.join(biased)}", "a drafter has no biases")
