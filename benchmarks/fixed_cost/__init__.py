"""Small trainings whose steps cost little, so that what watching adds to one can be seen."""
