"""The table of findings: every rule, in the order of its code. A code is never renumbered."""

from __future__ import annotations

from nanstop.rules import (
    ns000_not_established,
    ns101_narrow_range_for_model,
    ns102_half_precision_trainables,
    ns103_untrained_token_rows,
    ns201_fp16_overflow,
    ns202_fully_masked_row,
    ns204_invalid_operation,
    ns209_absorbed_overflow,
    ns301_gradient_overflow,
    ns302_loss_scale_collapse,
    ns304_backward_singularity,
    ns401_weights_not_finite,
    ns402_optimizer_broke_weights,
    ns501_non_finite_input,
    ns502_id_out_of_range,
    ns503_no_supervised_tokens,
    ns602_kernel_defect,
    ns603_not_reproducible,
    ns801_log_hides_failure,
    ns802_zero_loss_by_design,
)
from nanstop.rules.base import Rule

CATALOGUE: tuple[Rule, ...] = (
    ns000_not_established.RULE,
    ns101_narrow_range_for_model.RULE,
    ns102_half_precision_trainables.RULE,
    ns103_untrained_token_rows.RULE,
    ns201_fp16_overflow.RULE,
    ns202_fully_masked_row.RULE,
    ns204_invalid_operation.RULE,
    ns209_absorbed_overflow.RULE,
    ns301_gradient_overflow.RULE,
    ns302_loss_scale_collapse.RULE,
    ns304_backward_singularity.RULE,
    ns401_weights_not_finite.RULE,
    ns402_optimizer_broke_weights.RULE,
    ns501_non_finite_input.RULE,
    ns502_id_out_of_range.RULE,
    ns503_no_supervised_tokens.RULE,
    ns602_kernel_defect.RULE,
    ns603_not_reproducible.RULE,
    ns801_log_hides_failure.RULE,
    ns802_zero_loss_by_design.RULE,
)
