"""What a step minimizes: a file per objective, and what several of them compute with."""
