"""What must hold when building, caching, loading or running natively goes wrong: the reference goes on."""
