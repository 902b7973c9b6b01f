"""The target as decoding drives it: a cache that can be taken back, tapped features caught by hooks.

A cache is cropped only where every layer is plain full attention. Elsewhere (linear attention, convolutions, sliding
windows) `crop` would leave recurrent state behind in silence, so the state before a block is kept and the accepted
tokens are run again from it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from draftsmith.target.anatomy import first_tensor
from draftsmith.target.capture import upload
from draftsmith.target.model import Target


class TapHooks:
    """Forward hooks on tapped layers that keep the last forward's output; a context manager.

    Hooks, since wrappers of vision models ignore `output_hidden_states` and most taps would be computed for nothing.
    """

    def __init__(self, target: Target, taps: Sequence[int]):
        self._caught: dict[int, Tensor] = {}
        self._taps = tuple(taps)
        self._handles = [target.layers[tap].register_forward_hook(self._keeper(tap)) for tap in self._taps]

    def _keeper(self, tap: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            self._caught[tap] = first_tensor(output)

        return keep

    def features(self) -> Tensor:
        """Tapped hidden states of the last forward, [rows, length, F*H], on the device of the first tap."""
        first = self._caught[self._taps[0]]
        return torch.cat([self._caught[tap].to(first.device) for tap in self._taps], dim=-1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()


class Stepper:
    """One conversation in the target: `run` appends tokens, `commit` keeps only the first of the last run."""

    def __init__(self, target: Target):
        from transformers import DynamicCache  # a model that runs has long imported it; a plan never does

        self._target = target
        self._cache: Any = DynamicCache(config=target.model.config)
        self._before: Any = None
        self._block: list[int] = []
        self.num_reruns = 0
        """Forwards spent on running accepted tokens again."""

    @property
    def is_croppable(self) -> bool:
        from transformers.cache_utils import DynamicLayer

        return all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def run(self, token_ids: Sequence[int], *, last_only: bool = False) -> Tensor:
        """Logits [tokens, V] (fp32) after each of `token_ids`; with `last_only` [1, V]."""
        self._before = None if self.is_croppable else snapshot(self._cache)
        self._block = list(token_ids)
        output = self._forward(self._block, keep=1 if last_only else 0)
        return cast(Tensor, output.logits)[0].float()

    def commit(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` of the last run."""
        rejected = len(self._block) - num_tokens
        if rejected == 0:
            return
        if self.is_croppable:
            self._cache.crop(-rejected)
            return
        self._cache = self._before
        self._forward(self._block[:num_tokens], keep=1)
        self.num_reruns += 1

    def _forward(self, token_ids: list[int], keep: int) -> Any:
        ids = upload(torch.tensor([token_ids]), self._target.device)
        return self._target.model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=keep)


def snapshot(cache: Any) -> Any:
    """The cache as it is now, untouched by later forwards of the original.

    Keys and values are replaced by every update, never written in place, so they are shared; recurrent and
    convolution states are overwritten in place, so they are cloned.
    """
    twin = copy.copy(cache)
    twin.layers = [_twin_layer(layer) for layer in cache.layers]
    return twin


def _twin_layer(layer: Any) -> Any:
    twin = copy.copy(layer)
    attributes = cast(dict[str, Any], layer.__dict__)
    for name, states in attributes.items():
        if isinstance(states, dict):
            named = cast(dict[Any, Any], states)
            setattr(twin, name, {key: v.clone() if isinstance(v, Tensor) else v for key, v in named.items()})
    return twin
