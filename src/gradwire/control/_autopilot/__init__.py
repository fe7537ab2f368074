"""Parts of Autopilot: candidate settings, cost model, error model, allocation and budgets."""
