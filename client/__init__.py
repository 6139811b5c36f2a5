"""What programs use: a Runtime that starts or joins a cluster, launches runs and waits for them."""
