"""The processes of one job: ranks, sharded weights, and progress that one of them shows."""
