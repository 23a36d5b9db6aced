"""Speed and memory of named workloads: `fedjaxsim bench`."""
