"""From a module to a strategy and its program: capture, search, expansion."""
