"""Plans: the codec of each group of layers, and its first step; how plans are made and made anew."""

from gradlab.plan.lgc_recipe import LgcRecipe, lgc_plan
from gradlab.plan.plan import (
    FEEDBACK,
    FINITE_FLAG_BYTES,
    Group,
    Plan,
    Schedule,
    Wrap,
    default_wrappers,
    groups_of_the_rest,
)
from gradlab.plan.recipes import method_plan, named_plan
from gradlab.plan.state_bytes import state_bytes
from gradlab.plan.traffic import PayloadParts, most_ranks, payload_parts, pays_up_to, saving_of_sent, sent_bytes

__all__ = [
    "FEEDBACK",
    "FINITE_FLAG_BYTES",
    "Group",
    "LgcRecipe",
    "PayloadParts",
    "Plan",
    "Schedule",
    "Wrap",
    "default_wrappers",
    "groups_of_the_rest",
    "lgc_plan",
    "method_plan",
    "most_ranks",
    "named_plan",
    "payload_parts",
    "pays_up_to",
    "saving_of_sent",
    "sent_bytes",
    "state_bytes",
]
