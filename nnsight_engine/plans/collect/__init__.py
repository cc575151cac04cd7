"""Results of steps, collected in the scheduler until an output is sent, and assembled in the API process."""
