"""Losses over rectangular tensors [B, R]. Needs torch alone.

Each loss is one file that reads like its formula; `base` holds the aggregation, `core` the masking, the ratio and the
KL estimators. The formulas and their sources are in the table of the documentation.
"""

from forge.losses.base import TokenLoss
from forge.losses.cispo_loss import CISPOLoss
from forge.losses.core import batch_counts, kl_estimate, trained_mask
from forge.losses.correction import ImportanceCorrection
from forge.losses.dapo_loss import DAPOLoss
from forge.losses.diagnostics import Diagnostics, diagnostics, reduce_diagnostics
from forge.losses.dr_grpo_loss import DrGRPOLoss
from forge.losses.grpo_loss import GRPOLoss
from forge.losses.gspo_loss import GSPOLoss
from forge.losses.registry import AVAILABLE, LOSSES, build_loss, loss_arguments, needs_reference
from forge.losses.reinforce_loss import ReinforceLoss
from forge.losses.sapo_loss import SAPOLoss
from forge.losses.sft_loss import SFTLoss
from forge.losses.simple_grpo_loss import SimpleGRPOLoss

__all__ = [
    "AVAILABLE",
    "LOSSES",
    "CISPOLoss",
    "DAPOLoss",
    "Diagnostics",
    "DrGRPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "ImportanceCorrection",
    "ReinforceLoss",
    "SAPOLoss",
    "SFTLoss",
    "SimpleGRPOLoss",
    "TokenLoss",
    "batch_counts",
    "build_loss",
    "diagnostics",
    "kl_estimate",
    "loss_arguments",
    "needs_reference",
    "reduce_diagnostics",
    "trained_mask",
]
