"""Two devices, also on a machine with a CPU only, for what is divided over devices."""

import jax

jax.config.update("jax_num_cpu_devices", 2)
