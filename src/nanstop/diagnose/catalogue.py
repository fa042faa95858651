"""The table of findings: every rule, in the order of its code. A code is never renumbered."""

from __future__ import annotations

from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.findings.data.ns501_non_finite_input import RULE as NS501
from nanstop.diagnose.findings.data.ns502_id_out_of_range import RULE as NS502
from nanstop.diagnose.findings.data.ns503_no_supervised_tokens import RULE as NS503
from nanstop.diagnose.findings.data.ns504_outlier_batch import RULE as NS504
from nanstop.diagnose.findings.data.ns505_data_that_cannot_teach import RULE as NS505
from nanstop.diagnose.findings.data.ns506_constant_not_finite import RULE as NS506
from nanstop.diagnose.findings.forward.ns201_fp16_overflow import RULE as NS201
from nanstop.diagnose.findings.forward.ns202_fully_masked_row import RULE as NS202
from nanstop.diagnose.findings.forward.ns203_mask_arithmetic_overflow import RULE as NS203
from nanstop.diagnose.findings.forward.ns204_invalid_operation import RULE as NS204
from nanstop.diagnose.findings.forward.ns205_empty_denominator import RULE as NS205
from nanstop.diagnose.findings.forward.ns206_zero_norm_division import RULE as NS206
from nanstop.diagnose.findings.forward.ns207_exp_or_log_overflow import RULE as NS207
from nanstop.diagnose.findings.forward.ns208_silent_precision_loss import RULE as NS208
from nanstop.diagnose.findings.forward.ns209_absorbed_overflow import RULE as NS209
from nanstop.diagnose.findings.gradients.ns301_gradient_overflow import RULE as NS301
from nanstop.diagnose.findings.gradients.ns302_loss_scale_collapse import RULE as NS302
from nanstop.diagnose.findings.gradients.ns303_gradient_underflow import RULE as NS303
from nanstop.diagnose.findings.gradients.ns304_backward_singularity import RULE as NS304
from nanstop.diagnose.findings.gradients.ns305_norm_poisoned_clip import RULE as NS305
from nanstop.diagnose.findings.gradients.ns306_gradient_changed_before_update import RULE as NS306
from nanstop.diagnose.findings.gradients.ns307_swallowed_update import RULE as NS307
from nanstop.diagnose.findings.logs.ns801_log_hides_failure import RULE as NS801
from nanstop.diagnose.findings.logs.ns802_zero_loss_by_design import RULE as NS802
from nanstop.diagnose.findings.ns000_not_established import RULE as NS000
from nanstop.diagnose.findings.objective.ns701_no_learning_signal import RULE as NS701
from nanstop.diagnose.findings.objective.ns702_ratio_or_kl_blow_up import RULE as NS702
from nanstop.diagnose.findings.objective.ns703_train_inference_mismatch import RULE as NS703
from nanstop.diagnose.findings.objective.ns704_non_finite_reward import RULE as NS704
from nanstop.diagnose.findings.runtime.ns601_process_killed import RULE as NS601
from nanstop.diagnose.findings.runtime.ns602_kernel_defect import RULE as NS602
from nanstop.diagnose.findings.runtime.ns603_not_reproducible import RULE as NS603
from nanstop.diagnose.findings.runtime.ns604_out_of_memory import RULE as NS604
from nanstop.diagnose.findings.runtime.ns605_hang import RULE as NS605
from nanstop.diagnose.findings.runtime.ns606_race_or_collective import RULE as NS606
from nanstop.diagnose.findings.runtime.ns607_copies_drifted_apart import RULE as NS607
from nanstop.diagnose.findings.setup.ns101_narrow_range_for_model import RULE as NS101
from nanstop.diagnose.findings.setup.ns102_half_precision_trainables import RULE as NS102
from nanstop.diagnose.findings.setup.ns103_untrained_token_rows import RULE as NS103
from nanstop.diagnose.findings.setup.ns104_precision_unsupported import RULE as NS104
from nanstop.diagnose.findings.setup.ns105_uninitialised_weights import RULE as NS105
from nanstop.diagnose.findings.setup.ns106_checkpoint_not_finite import RULE as NS106
from nanstop.diagnose.findings.setup.ns107_quantisation_misuse import RULE as NS107
from nanstop.diagnose.findings.setup.ns108_known_bad_stack import RULE as NS108
from nanstop.diagnose.findings.setup.ns109_task_or_head_mismatch import RULE as NS109
from nanstop.diagnose.findings.setup.ns110_optimizer_eps_vanishes import RULE as NS110
from nanstop.diagnose.findings.setup.ns111_update_lost_to_rounding import RULE as NS111
from nanstop.diagnose.findings.setup.ns112_clip_scale_order import RULE as NS112
from nanstop.diagnose.findings.setup.ns113_hyperparameter_out_of_range import RULE as NS113
from nanstop.diagnose.findings.setup.ns114_no_gradient_path import RULE as NS114
from nanstop.diagnose.findings.setup.ns115_resume_state_lost import RULE as NS115
from nanstop.diagnose.findings.setup.ns116_update_cannot_be_vetoed import RULE as NS116
from nanstop.diagnose.findings.setup.ns117_accumulation_changes_loss import RULE as NS117
from nanstop.diagnose.findings.setup.ns118_objective_fed_with_the_wrong_thing import RULE as NS118
from nanstop.diagnose.findings.setup.ns119_left_in_evaluation_mode import RULE as NS119
from nanstop.diagnose.findings.weights.ns401_weights_not_finite import RULE as NS401
from nanstop.diagnose.findings.weights.ns402_optimizer_broke_weights import RULE as NS402
from nanstop.diagnose.findings.weights.ns403_optimizer_state_invalid import RULE as NS403
from nanstop.diagnose.findings.weights.ns404_divergence import RULE as NS404

CATALOGUE: tuple[Rule, ...] = (
    NS000,
    *(NS101, NS102, NS103, NS104, NS105, NS106, NS107, NS108, NS109, NS110, NS111),
    *(NS112, NS113, NS114, NS115, NS116, NS117, NS118, NS119),
    *(NS201, NS202, NS203, NS204, NS205, NS206, NS207, NS208, NS209),
    *(NS301, NS302, NS303, NS304, NS305, NS306, NS307),
    *(NS401, NS402, NS403, NS404),
    *(NS501, NS502, NS503, NS504, NS505, NS506),
    *(NS601, NS602, NS603, NS604, NS605, NS606, NS607),
    *(NS701, NS702, NS703, NS704),
    *(NS801, NS802),
)
