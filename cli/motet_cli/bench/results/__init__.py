"""Evaluate and present a run: records, statistics, summary, table, plot and JSON report."""
