"""What runs beside a measurement: clients in processes of their own, and a server in the benchmark's."""
