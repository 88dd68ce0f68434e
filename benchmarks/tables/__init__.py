"""Tables and sentences that report.py makes from the result files."""
