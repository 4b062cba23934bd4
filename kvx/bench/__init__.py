"""Benches: check against the definition, then time. `kvx bench write|gather|amax|call`; results go to bench/results/ as JSON."""
