"""Flat buffers: who lies where, who shares memory with whom, and why masters are fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.drafter.linear import Linear
from draftsmith.drafter.model import CONTEXT, Drafter, init_weights
from draftsmith.train.parameters import ALIGNMENT, FlatParameters
from tests.train.tiny import CONFIG


def installed(dtype: torch.dtype) -> tuple[Drafter, FlatParameters]:
    drafter = Drafter(CONFIG)
    init_weights(drafter, 0)
    return drafter, FlatParameters.install(drafter, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_modules_parameters_are_views_of_the_shadow(dtype: torch.dtype) -> None:
    drafter, flat = installed(dtype)
    low = flat.shadow_N.data_ptr()
    high = low + flat.shadow_N.numel() * dtype.itemsize
    named = dict(drafter.named_parameters())
    assert {piece.name for piece in flat.slices} == set(named)
    for piece, leaf in zip(flat.slices, flat.leaves, strict=True):
        assert named[piece.name] is leaf
        assert leaf.dtype == dtype
        assert low <= leaf.data_ptr() < high
        assert leaf.data_ptr() == piece.view(flat.shadow_N).data_ptr()


def test_initial_weights_arrive_in_the_masters_unrounded() -> None:
    fresh = Drafter(CONFIG)
    init_weights(fresh, 0)
    _, flat = installed(torch.bfloat16)
    masters = flat.named(flat.master_N)
    for name, value in fresh.named_parameters():
        assert torch.equal(masters[name], value.detach())
        assert torch.equal(flat.named(flat.shadow_N)[name], value.detach().bfloat16())


def test_in_fp32_master_and_shadow_are_one_buffer() -> None:
    _, flat = installed(torch.float32)
    assert flat.shadow_N is flat.master_N
    before = flat.master_N.clone()
    flat.publish()
    assert torch.equal(flat.master_N, before)


def test_publish_writes_what_computes_in_place() -> None:
    drafter, flat = installed(torch.bfloat16)
    address = flat.shadow_N.data_ptr()
    flat.named(flat.master_N)["norm.weight"].fill_(1.001)
    assert (drafter.norm.weight == 1).all()
    flat.named(flat.master_N)["norm.weight"].fill_(1.25)
    flat.publish()
    assert (drafter.norm.weight == 1.25).all()
    assert flat.shadow_N.data_ptr() == address


def test_matrices_come_first_and_norms_after_them() -> None:
    _, flat = installed(torch.float32)
    for piece in flat.slices:
        is_matrix = len(piece.shape) > 1
        assert is_matrix == (piece.offset < flat.num_matrix)
    assert flat.num_matrix > 0


def test_slices_are_aligned_disjoint_and_gaps_hold_zeros() -> None:
    _, flat = installed(torch.float32)
    covered = torch.zeros_like(flat.master_N)
    for piece in flat.slices:
        assert piece.offset % ALIGNMENT == 0
        piece.view(covered).add_(1)
    assert covered.max() == 1
    assert (covered == 0).any(), "the test needs a gap"
    assert (flat.master_N[covered == 0] == 0).all()


def test_gradients_are_added_in_fp32() -> None:
    """In bf16, 1 + 2^-9 is 1: the second draw of a step would be lost."""
    _, flat = installed(torch.bfloat16)
    assert flat.grad_N.dtype == torch.float32
    ones = tuple(torch.ones_like(leaf) for leaf in flat.leaves)
    flat.add_gradients(ones)
    flat.add_gradients(tuple(one * 2**-9 for one in ones))
    for value in flat.named(flat.grad_N).values():
        assert (value == 1 + 2**-9).all()


def test_a_module_without_matrices_has_none() -> None:
    flat = FlatParameters.install(nn.LayerNorm(5), torch.float32, "cpu")
    assert flat.num_matrix == 0
    assert flat.master_N.numel() == 2 * ALIGNMENT


def test_a_parameter_that_nothing_used_is_an_error_and_a_summed_weight_is_not() -> None:
    drafter = Drafter(CONFIG)
    flat = FlatParameters.install(drafter, torch.float32, "cpu")
    names = [piece.name for piece in flat.slices]
    assert flat.summed == {name for name in names if "norm" not in name}
    for name, part in drafter.named_modules():
        if isinstance(part, Linear):
            assert part.main_grad is not None
            assert part.main_grad.data_ptr() == flat.named(flat.grad_N)[f"{name}.weight"].data_ptr()
    given = [
        None if name in flat.summed else torch.ones(piece.shape) for name, piece in zip(names, flat.slices, strict=True)
    ]
    flat.add_gradients(tuple(given))
    given[names.index("norm.weight")] = None
    with pytest.raises(RuntimeError, match=r"^norm\.weight got no gradient: the forward doesn't use it"):
        flat.add_gradients(tuple(given))


def test_frozen_parameters_lie_last_without_gradient_or_moment() -> None:
    drafter = Drafter(CONFIG)
    init_weights(drafter, 0)
    before = {name: value.detach().clone() for name, value in drafter.named_parameters()}
    flat = FlatParameters.install(drafter, torch.bfloat16, "cpu", CONTEXT)
    assert [piece.name for piece in flat.slices[-2:]] == list(CONTEXT)
    assert flat.num_matrix < flat.num_trained < flat.master_N.numel()
    assert flat.grad_N.numel() == flat.num_trained
    assert flat.named(flat.grad_N).keys() == before.keys() - set(CONTEXT)
    assert flat.named(flat.master_N).keys() == before.keys()
    assert not flat.summed & set(CONTEXT)
    for name, value in drafter.named_parameters():
        assert value.requires_grad == (name not in CONTEXT)
        assert torch.equal(value, before[name].bfloat16())
    assert len(flat.leaves) == len(before) - 2
