"""What the commands do, imported only once one of them is called: help must not wait for JAX."""
