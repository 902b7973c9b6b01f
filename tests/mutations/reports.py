"""Faults that public reports of other trainers name, of captured features, anchors, the loss and its reduction."""

from __future__ import annotations

from tests.mutations.mutation import fault

LINEAR = "target/test_linear_attention.py"
CAPTURE = "target/test_capture.py::test_B12_B13_B14_every_token_has_the_feature_row_of_its_own_place"
SHARE = "drafter/test_anchors.py::test_C08_a_short_documents_share_of_the_anchors_is_its_share_of_the_tokens"
LABELS = (
    "drafter/test_anchors.py::test_C07_every_supervised_token_behind_a_supervised_one_is_a_label_and_no_anchor_has_none"
)
NORMALISER = "drafter/test_loss.py::test_C14_every_path_and_block_size_shares_one_normaliser"
FEW = "pipeline/test_reduce.py::test_C15_a_label_weighs_the_same_on_a_drafter_with_few_of_them"
FED = "train/test_step.py::test_C17_the_drafter_is_fed_the_true_token_and_masks_never_its_own_guesses"
NORMED = "drafter/test_model.py::test_C21_what_a_head_reads_is_normalised_so_no_layers_scale_reaches_the_loss"

MUTATIONS = (
    fault(
        "B12 B13 the last token has no feature row",
        "target/capture.py",
        "rows_RL[i, :length] = torch.arange(offset, offset + length)",
        "rows_RL[i, : length - 1] = torch.arange(offset, offset + length - 1)",
        CAPTURE,
    ),
    fault(
        "B14 features stand one place late",
        "target/capture.py",
        "hidden_NH.to(buffer_TH.device, buffer_TH.dtype)",
        "hidden_NH.roll(1, 0).to(buffer_TH.device, buffer_TH.dtype)",
        CAPTURE,
    ),
    fault(
        "C07 labels end one token before their span",
        "drafter/anchors.py",
        "loss_mask_T[index_AB] &",
        "F.pad(loss_mask_T[1:], (0, 1), value=False)[index_AB] &",
        LABELS,
    ),
    fault(
        "C08 later documents go before short early ones",
        "drafter/anchors.py",
        "torch.where(eligible_T, uniforms_T, -1.0)",
        "torch.where(eligible_T, uniforms_T + document_ids_T, -1.0)",
        SHARE,
    ),
    fault(
        "C14 the fused way divides by the places of a block too",
        "drafter/loss.py",
        "gradient = row_gradient(kind, logits, labels, teacher) * weights[:, None]",
        "gradient = row_gradient(kind, logits, labels, teacher) * weights[:, None] / max(1, spec.block_size - 1)",
        NORMALISER,
    ),
    fault(
        "C14 the known place is in the denominator",
        "drafter/objectives.py",
        "return weights_AG, counts_AG.sum()",
        "return weights_AG, counts_AG.sum() + guessed_AG.shape[0]",
        NORMALISER,
    ),
    fault(
        "C15 each drafter divides by its own labels",
        "pipeline/reduce.py",
        "state.sums.copy_(self._sums)",
        "state.sums.mul_(1.0)",
        FEW,
    ),
    fault(
        "C17 the drafter's guesses are fed back",
        "train/step.py",
        "    teacher_GH = None\n",
        """    guess_AGH = F.embedding((hidden_GH @ ends.head_VH.T.to(dtype)).argmax(-1), ends.embedding_VH).to(dtype)
    anchor_A1H = block_QH.view(config.num_anchors, drafter.block_size, -1)[:, :1]
    hidden_GH = state.forward(
        torch.cat([anchor_A1H, guess_AGH.view(config.num_anchors, drafter.block_size - 1, -1)], 1).flatten(0, 1),
        features_TFH,
        rope_table(layout.positions_T, state.inv_freq, state.rope_factor, dtype),
        rope_table(blocks.positions_Q, state.inv_freq, state.rope_factor, dtype),
        make_masks(state, anchors, layout),
        config.checkpoint_layers,
        True,
    )
    teacher_GH = None
""",
        FED,
    ),
    fault(
        "C21 the head reads the residual stream as it is", "drafter/model.py", "return self.norm(x)", "return x", NORMED
    ),
    fault(
        "a compiled hybrid traces its delta rule",
        "target/compute.py",
        "    keep_rules_whole(target)\n",
        "",
        LINEAR,
    ),
    fault(
        "a traced function takes the slow reference",
        "target/linear_attention.py",
        "    names[EXPORTING] = never_exports\n",
        "",
        LINEAR,
    ),
    fault(
        "a delta rule that keeps a state runs as the operation that has none",
        "target/linear_attention.py",
        "if starts_or_ends or options",
        "if options",
        LINEAR,
    ),
    fault(
        "long runs start from the target's layers",
        "pipeline/resolve.py",
        '"target" if total_steps < RANDOM_START_STEPS',
        '"target" if total_steps > RANDOM_START_STEPS',
        "pipeline/test_resolve.py",
    ),
)
