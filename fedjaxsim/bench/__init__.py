"""Speed and memory of named workloads, against the ceilings of the machine: `fedjaxsim bench`."""
