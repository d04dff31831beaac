"""Findings about a job's programs before it runs: see docs/checks.md."""
