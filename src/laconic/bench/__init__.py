"""The bench: what a run measured, kept as records and shown as tables and one report page."""
