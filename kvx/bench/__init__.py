"""Benches: check against the definition, then time. `kvx bench write|gather|amax|call`; `--out` saves a result as JSON."""
