"""spec x topology -> plan."""

from mgpu.plan.plan import Plan, listen, make_plan, make_strategy

__all__ = ["Plan", "listen", "make_plan", "make_strategy"]
