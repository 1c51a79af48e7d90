"""Step closures, and the reports that are made with them."""
