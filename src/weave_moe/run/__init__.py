"""What the commands do: routing sources, comparison of policies, tables and timelines."""
