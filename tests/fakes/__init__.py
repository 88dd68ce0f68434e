"""Stand-ins for engines that are too large to install for every test run."""
