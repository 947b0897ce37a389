"""What operators, collectives and bytes cost, and what a program of them costs."""
