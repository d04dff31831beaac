"""What NCCL does with a call: its tuning tables, its choice of algorithm and protocol, and how long that takes."""
