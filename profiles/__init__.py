"""Hardware and cluster descriptions: TOML data and the loader that checks it."""
